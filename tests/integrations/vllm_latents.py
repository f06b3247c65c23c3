"""A backend over latents inside vLLM beside vLLM's own, on a tiny model: part of `make test-vllm`.

Run by the Python of an environment that has vLLM for a CPU. Out: exit status 0 if the greedy tokens of
prompts of several lengths are those of vLLM's CPU_MLA: whole prompts in its place, and prompts in
chunks in that of AMX_MLA, which vLLM takes unasked where the CPU has such a unit. Each engine is a
process, since the choice is made once a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_TOKENS = 24
WHOLE: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}, "enable_prefix_caching": False}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
"""Settings of vLLM: for its reference kernel, which takes whole prompts alone; and for chunks."""


def main() -> None:
    """Make the model, ask both, compare."""
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder))
        theirs = _ask(folder, None, WHOLE)
        assert set(theirs["impls"]) == {"vllm.v1.attention.backends.mla.cpu_mla"}, theirs["impls"]
        for settings in (WHOLE, CHUNKED):
            ours = _ask(folder, "cpu_mla", settings)
            assert set(ours["impls"]) == {"attnkit.integrations.vllm.latents"}, ours["impls"]
            assert ours["tokens"] == theirs["tokens"], (settings, ours["tokens"], theirs["tokens"])
    print(f"cpu_mla in vLLM: the tokens of CPU_MLA, {len(theirs['tokens'])} x {NUM_TOKENS}, twice")


def _save_model(folder: Path) -> None:
    """Latents of DeepSeek's sizes, the only ones that vLLM's kernel takes; no experts."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))
    import tiny_models

    tiny_models.save_model(
        folder,
        "deepseek_v3",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=64,
        first_k_dense_replace=3,
    )


def _ask(folder: str, backend: str | None, settings: dict[str, Any]) -> dict[str, list[Any]]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ATTNKIT_VLLM")}
    chosen = {} if backend is None else {"ATTNKIT_VLLM": backend}
    done = subprocess.run(
        [sys.executable, __file__, folder, json.dumps(settings)],
        env={
            **environment,
            **quiet,
            **chosen,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr[-6000:])
    return json.loads(done.stdout.splitlines()[-1])


def _generate(folder: str, settings: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        # vLLM's own norm for CPUs does not give a row of latents the same numbers in every batch.
        compilation_config={"custom_ops": ["none"]},
        **settings,
    )
    prompts = [[(7 * i + n) % 250 + 3 for i in range(n)] for n in (1, 5, 33, 40, 150, 17)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    impls = llm.collective_rpc(
        lambda worker: [
            type(layer.impl).__module__
            for layer in worker.model_runner.compilation_config.static_forward_context.values()
        ]
    )[0]
    print(json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "impls": impls}))


if __name__ == "__main__":
    _generate(sys.argv[1], json.loads(sys.argv[2])) if len(sys.argv) > 1 else main()
