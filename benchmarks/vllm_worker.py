# pyright: reportMissingImports=false
"""The other end of vllm_engine.py; runs under another Python, without attnkit.bench.

In: arguments MODEL DTYPE eager|compiled, then one JSON request a line on stdin: prompts as token ids
and how many tokens are wanted. Out: one JSON line when ready, then one per request, on what was
stdout at the start; vLLM's own messages go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def attention_of(worker: Any) -> str:
    """Which class runs the first attention layer."""
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        kind = type(layer.impl)
        return f"{kind.__module__}.{kind.__qualname__}"
    return "none"


def main() -> None:
    """Load, say so, answer until the input ends."""
    model, dtype, mode = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()

    import torch
    import vllm

    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        enforce_eager=mode == "eager",
        enable_prefix_caching=False,
        seed=0,
    )

    def reply(content: dict) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    reply(
        {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "impl": llm.collective_rpc(attention_of)[0],
            "seconds": time.perf_counter() - start,
        }
    )
    for line in sys.stdin:
        request = json.loads(line)
        num_tokens = request["num_tokens"]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        reply({"tokens": [list(output.outputs[0].token_ids) for output in outputs]})


if __name__ == "__main__":
    main()
