"""A third party's package: one file, one entry point, installed into an environment of its own.

The file is the one that docs/add-a-backend.md tells its reader to write. The environment sees this one's
packages and has the third party's installed by pip, without network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

ROOT = Path(__file__).parents[2]
COMMAND = "from attnkit.cli import main; main()"
GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM
import attnkit

folder = sys.argv[1]
prompts = [[5, 6, 7, 8, 9], [200]]
params = attnkit.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

def runner(backend):
    llm = attnkit.LLM(folder, backend=backend, num_blocks=9)
    tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    return list(llm.backends), tokens

chosen, tokens = runner("mine")
assert chosen == ["mine"], chosen
assert tokens == runner("reference")[1]

model = AutoModelForCausalLM.from_pretrained(folder).eval()
ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
for row, prompt in enumerate(prompts):
    ids[row, 5 - len(prompt):], mask[row, 5 - len(prompt):] = torch.tensor(prompt), 1
assert "mine: chosen" in str(attnkit.hf.enable(model, backend="mine"))
out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, eos_token_id=319,
                     pad_token_id=0)
assert out[:, 5:].tolist() == tokens, (out, tokens)

backend = attnkit.Attention(num_heads=2, head_size=8, backend="mine").backend
assert backend.__module__ == "my_attention", backend
assert "site-packages" in sys.modules["my_attention"].__file__
"""


def write_wheel(folder: Path) -> Path:
    """The package as a build tool makes it of my_attention.py and the entry point of the docs."""
    page = (ROOT / "docs" / "add-a-backend.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (entry_point,) = re.findall(r'\[project\.entry-points\."(attnkit\.backends)"\]', page)
    info = "my_attention-1.0.dist-info"
    files = {
        "my_attention.py": module,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: my-attention\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{entry_point}]\nmine = my_attention:MyBackend\n",
    }
    record = [f"{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / "my_attention-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the package; this one's packages are behind its own."""
    home = tmp_path_factory.mktemp("third_party")
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    (packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    ours = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in ours]
    (packages / "behind.pth").write_text("\n".join(lines))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, write_wheel(home)], check=True, timeout=120)
    return python


def run(python: Path, *arguments: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "ATTNKIT_BACKEND"}
    done = subprocess.run(
        [python, "-c", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_it_is_listed_and_passes_the_kit(python, tmp_path):
    listed = json.loads(run(python, COMMAND, "backends", "--json", cwd=tmp_path))
    assert listed["mine"]["runs here"] == "yes"
    report = json.loads(
        run(python, COMMAND, "verify", "mine", "--only", "fp32", "--json", cwd=tmp_path)
    )
    assert report["ok"]
    assert report["backend"] == "mine"


def test_it_runs_by_name_in_the_runner_and_in_transformers(python, tmp_path):
    folder = tiny_models.save_model(tmp_path / "model", tokenizer=False)
    run(python, GENERATE, folder, cwd=tmp_path)
