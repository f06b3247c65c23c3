# pyright: reportMissingImports=false
"""The other end of llama_engine.py; runs under another Python, without attnkit.bench.

In: arguments GGUF THREADS, then one JSON request a line on stdin: prompts as token ids and how many
tokens are wanted. Out: one JSON line when ready, then one per request, on what was stdout at the start.
"""

from __future__ import annotations

import itertools
import json
import os
import sys


def main() -> None:
    """Load, say so, answer until the input ends."""
    gguf, threads = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import llama_cpp

    llm = llama_cpp.Llama(
        gguf, n_ctx=2048, n_threads=int(threads), n_threads_batch=int(threads), verbose=False
    )

    def reply(content: dict) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    system = llama_cpp.llama_print_system_info().decode()
    reply({"version": llama_cpp.__version__, "system": system})
    for line in sys.stdin:
        request = json.loads(line)
        tokens = []
        for prompt in request["prompts"]:
            llm.reset()  # Else the prompt before it would be found computed.
            greedy = llm.generate(prompt, temp=0.0, repeat_penalty=1.0)
            tokens.append(list(itertools.islice(greedy, request["num_tokens"])))
        reply({"tokens": tokens})


if __name__ == "__main__":
    main()
