"""llama.cpp as a contender of end-to-end benchmarks.

In: the Python of an environment with llama-cpp-python, and a GGUF file. Out: a `PipedEngine`. Requests
run one after another: for one stream, not for batches.
"""

from __future__ import annotations

from pathlib import Path

from piped_engine import PipedEngine

_WORKER = Path(__file__).with_name("llama_worker.py")


class LlamaEngine(PipedEngine):
    """One llama.cpp."""

    def __init__(self, python: Path, gguf: Path, num_threads: int) -> None:
        """Start it and wait until it is ready.

        Args:
            python: that has llama-cpp-python, built for this processor.
            gguf: file of the model.
            num_threads: to compute on.
        """
        super().__init__([python, _WORKER, gguf, str(num_threads)], name="llama.cpp")
        self.note = f"llama-cpp-python {self.facts['version']}, {gguf.name}, {self.facts['system']}"
