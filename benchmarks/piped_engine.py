"""A contender of end-to-end benchmarks in a process of its own, under its own Python.

In: a command whose process speaks JSON lines: one when it is ready, then one for each request, which are
prompts as token ids and how many tokens are wanted. Out: an engine as `attnkit.bench.e2e.measure` takes
them; its model stays loaded between rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PAUSE_S = 0.5
"""OpenMP threads of an engine that has just finished spin for up to 0.2 s (libiomp's default)."""


class PipedEngine:
    """One engine, answering over pipes.

    Attributes:
        name, is_rival: as the table shows it.
        facts: what its process said of itself when it was ready.
        note: of them, as the table shows it.
    """

    note = ""

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str,
        is_rival: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            command: of the process.
            name: of this contender.
            is_rival: it is none where our backend runs inside.
            environment: added to its environment variables.
        """
        self.name = name
        self.is_rival = is_rival
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ATTNKIT_VLLM")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **(environment or {})},
            text=True,
        )
        self.facts = self._receive()

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
