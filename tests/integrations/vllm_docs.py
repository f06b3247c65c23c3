"""Runs the examples of docs/vllm.md in an environment that has vLLM: part of `make test-vllm`.

In: the Python of that environment. Out: exit status 0 if each put out text through the attention it is
about: ours in vLLM, vLLM's in our runner, and in vLLM the file of docs/add-a-backend.md. Their model is
replaced by the one that is installed here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from attnkit.runner.checkpoint import resolve_checkpoint

CHECKS = (
    """
layers = llm.collective_rpc(lambda worker: [
    type(layer.impl).__module__
    for layer in worker.model_runner.compilation_config.static_forward_context.values()
])[0]
assert set(layers) == {"attnkit.integrations.vllm.backend"}, layers
""",
    """
assert "foreign:CPU_ATTN: chosen" in llm.explain(), llm.explain()
""",
)
"""What must hold after each example of the page."""

THIRD_PARTY = """
from attnkit.integrations.vllm.answers import OURS
assert OURS.__name__ == "MyBackend", OURS
"""


def main() -> None:
    """Take the examples out of the page and run them."""
    codes = _examples("vllm.md")
    for code, check in zip(codes, CHECKS, strict=True):
        _run(code, check)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "my_attention.py")
        file.write_text(*_examples("add-a-backend.md"))
        named = codes[0].replace(
            '["ATTNKIT_VLLM"] = "cpu"', f'["ATTNKIT_VLLM"] = "{file}:MyBackend"'
        )
        assert named != codes[0]
        _run(named, CHECKS[0] + THIRD_PARTY)


def _examples(page: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def _run(code: str, check: str) -> None:
    name = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
    assert name in code
    code = code.replace(name, repr(str(resolve_checkpoint(None).source))) + check
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ATTNKIT_VLLM")}
    done = subprocess.run(
        [sys.argv[1], "-c", code], env={**environment, **quiet}, capture_output=True, text=True
    )
    print(done.stdout[-500:])
    if done.returncode or "Paris" not in done.stdout:
        sys.exit(done.stderr[-4000:])


if __name__ == "__main__":
    main()
