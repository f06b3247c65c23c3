"""Arrows between the parts of attnkit run one way, and importing it takes torch and numpy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnkit

ROOT = Path(attnkit.__file__).parent

# Part -> the parts it may import. A part is a folder or a file right below attnkit; "" is the package
# itself. What stands lower in the table may import more.
FOUNDATION = {"errors", "arguments", "environment", "garbage", "contract"}
PAGES = FOUNDATION | {"upload", "batch", "kvcache"}
CHOICE = PAGES | {
    "output_quant",
    "mla",
    "backends",
    "matrix",
    "registry",
    "selection",
    "compiled",
    "batch_checks",
    "step_checks",
    "paged_layer",
    "layer",
    "prefill_selection",
    "mla_layer",
    "indexer",
}
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "environment": set(),
    "garbage": set(),
    "upload": set(),
    "contract": {"errors", "arguments"},
    "batch": {"errors", "arguments", "contract", "upload"},
    "kvcache": {"errors", "arguments", "contract"},
    "output_quant": {"errors", "contract", "kvcache"},
    "mla": {"errors", "arguments", "contract", "kvcache", "upload", "output_quant"},
    "backends": {
        "errors",
        "arguments",
        "contract",
        "kvcache",
        "environment",
        "mla",
        "output_quant",
    },
    "matrix": {"errors", "contract"},
    "compiled": {"errors"},
    "batch_checks": {"errors", "contract"},
    "registry": {"errors", "contract", "backends"},
    "selection": {"errors", "arguments", "contract", "backends", "registry"},
    "step_checks": {"errors", "contract", "output_quant", "selection"},
    "paged_layer": {
        "errors",
        "arguments",
        "contract",
        "batch_checks",
        "compiled",
        "output_quant",
        "selection",
        "step_checks",
    },
    "layer": {
        "errors",
        "arguments",
        "contract",
        "backends",
        "output_quant",
        "selection",
        "step_checks",
        "paged_layer",
    },
    "prefill_selection": {"errors", "contract", "mla", "backends", "selection"},
    "mla_layer": {
        "errors",
        "arguments",
        "contract",
        "kvcache",
        "mla",
        "backends",
        "output_quant",
        "selection",
        "prefill_selection",
        "step_checks",
        "paged_layer",
    },
    "indexer": {"errors", "arguments", "contract", "kvcache", "mla", "backends"},
    "parallel": {"errors", "contract", "layer"},
    "runner": CHOICE,
    "conformance": CHOICE | {"runner", ""},
    "bench": CHOICE | {"runner", "conformance", ""},
    "integrations": CHOICE | {"runner", "parallel"},
    "cli": CHOICE | {"runner", "conformance", "bench", "parallel", ""},
    "__main__": {"cli"},
    "": CHOICE | {"runner", "integrations"},
}
"""`""`, the package itself, hands the public names on; only what stands outside may go through it."""


def _module_of(path: Path) -> str:
    """Dotted name below attnkit; "" for its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def _imports(path: Path) -> Iterator[str]:
    """Modules of attnkit that a file imports, anywhere in it, for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, below = name.partition(".")
            if top != "attnkit":
                continue
            # The last part may be a name in a module instead of a module.
            while below and below not in MODULES:
                below = below.rpartition(".")[0]
            yield below


def _part(module: str) -> str:
    return module.partition(".")[0]


def test_every_part_has_its_place() -> None:
    assert {_part(module) for module in MODULES} <= set(ARROWS)
    assert {part for allowed in ARROWS.values() for part in allowed} <= set(ARROWS)


def test_the_table_has_no_circle() -> None:
    left = {part: set(allowed) for part, allowed in ARROWS.items()}
    while left:
        free = [part for part, allowed in left.items() if not allowed & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for part in free:
            del left[part]


@pytest.mark.parametrize("module", MODULES)
def test_arrows_run_one_way(module: str) -> None:
    part = _part(module)
    backwards = [
        imported
        for imported in _imports(MODULES[module])
        if _part(imported) != part and _part(imported) not in ARROWS[part]
    ]
    assert backwards == []


def test_a_backward_arrow_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "def f():\n    from attnkit.layer import Attention\n    import attnkit.cli\n"
        "    from attnkit import selection, contract\n    import torch\n"
    )
    assert list(_imports(path)) == ["layer", "cli", "selection", "contract"]


SHARED_BY_BACKENDS = {"codes", "dense", "kernel_call", "libraries", "queries", "repeat", "stored"}

BUILT_ON = {
    ("backends.hopper.mla", "backends.triton.mla"),
    ("backends.flash_attn_mla_prefill", "backends.flash_attn"),
    ("backends.flashinfer_mla_prefill", "backends.flashinfer"),
}
"""Rows of latents are written, and prompts attended to, by the portable kernels on Hopper too. A library
is called for layers over latents as for others."""


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("backends.")])
def test_backends_do_not_know_each_other(module: str) -> None:
    """Nor the reference, nor the table they stand in. What several share stands beside them and knows
    no backend."""
    known = {module.split(".")[1], *SHARED_BY_BACKENDS}
    others = [
        imported
        for imported in _imports(MODULES[module])
        if _part(imported) == "backends"
        and not set(imported.split(".")[1:2]) & known
        and (module, imported) not in BUILT_ON
    ]
    assert others == []


def test_the_contract_is_one_module_to_everybody_else() -> None:
    """Its files may move: others import names from `attnkit.contract` itself."""
    inside = {
        (module, imported)
        for module, path in MODULES.items()
        if _part(module) != "contract"
        for imported in _imports(path)
        if imported.startswith("contract.")
    }
    assert inside == set()


# A fresh interpreter

ONE_BY_ONE = """
import importlib, os, sys, traceback
# The package is there before any of its modules; what others made may be, and takes seconds.
for name in ("attnkit", "torch._inductor.custom_graph_pass", "triton", "matplotlib.pyplot", "pytest"):
    importlib.import_module(name)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # What is not installed here is no fault of ours.
            os._exit(0 if not (error.name or "attnkit").startswith("attnkit") else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
if failed:
    sys.exit(", ".join(failed))
"""


def test_every_module_can_be_the_first_to_be_imported() -> None:
    """None counts on what another one has registered, as a graph pass did on the CPU's operations."""
    names = [f"attnkit.{module}" for module in MODULES if module and "__main__" not in module]
    run = subprocess.run([sys.executable, "-c", ONE_BY_ONE, *names], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


BLOCKED = (
    "triton",
    "transformers",
    "safetensors",
    "gguf",
    "accelerate",
    "typer",
    "rich",
    "matplotlib",
    "huggingface_hub",
    "pytest",
    "hypothesis",
    "vllm",
    "flash_attn",
    "flashinfer",
    "numba",
)
# torch itself looks for some of them and lives without; attnkit must not ask at all.
_FRESH = f"""
import sys
import torch

blocked, asked = {BLOCKED!r}, []

class Without:
    # A finder that finds nothing of what is blocked.

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            asked.append(name)
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

for name in [m for m in sys.modules if m.partition(".")[0] in blocked]:
    del sys.modules[name]
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def _run_fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _FRESH + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_takes_torch_and_numpy_alone_and_touches_no_gpu() -> None:
    out = _run_fresh("""
before = set(sys.modules)
import attnkit, attnkit.contract, attnkit.errors, attnkit.matrix
assert not asked, asked
assert not torch.cuda.is_initialized()
third = {m.partition(".")[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(name for name in third if not name.startswith("_")))
""")
    assert set(ast.literal_eval(out)) <= {"attnkit", "torch", "numpy"}


def test_a_layer_runs_with_torch_and_numpy_alone() -> None:
    _run_fresh("""
import attnkit
layer = attnkit.Attention(num_heads=4, head_size=8, num_kv_heads=2, return_lse=True)
cache = attnkit.PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, num_blocks=4)
plan = layer.build(attnkit.make_batch([5], [5], [[2]], 16))
q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
out, lse = layer(q, k, k, cache[layer.layer_name], plan)
assert out.isfinite().all() and lse.isfinite().all()
refused = {d.name: d.reasons for d in layer.selection.decisions}
assert "triton is not installed" in refused["triton"], refused
assert "triton" not in sys.modules
""")


def test_the_runner_comes_in_when_it_is_asked_for() -> None:
    _run_fresh("""
import attnkit
assert "LLM" in dir(attnkit) and "attnkit.runner.llm" not in sys.modules
from attnkit import LLM, SamplingParams
assert LLM.__module__ == "attnkit.runner.llm"
try:
    attnkit.no_such_name
except AttributeError as unknown:
    assert "no_such_name" in str(unknown)
""")


def test_public_names_are_complete_and_there() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnkit.")
        for alias in node.names
    }
    assert set(attnkit.__all__) == imported
    # Constants, classes, functions, as the linter sorts them (LLM looks like a constant).
    assert attnkit.__all__ == sorted(attnkit.__all__, key=_isort_key)
    for name in attnkit.__all__:
        assert getattr(attnkit, name).__doc__
    assert set(attnkit.__all__) <= set(dir(attnkit))


def _isort_key(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_the_package_runs_as_its_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "attnkit", "explain", "--backend", "reference"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "reference: chosen" in run.stdout
