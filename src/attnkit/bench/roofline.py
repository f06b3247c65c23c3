"""Roofline: what this device can do at best, measured, and how near a workload's time comes to it.

In: a device, measured in this process. Out: `Ceilings` (read, copy, matrix products per dtype) and
the fraction of them that a time stands for. Datasheet figures appear nowhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.bench.timing import Effort, time_cold, time_host
from attnkit.bench.workloads import DTYPES, Workload

_GPU_BYTES = 2 << 30
_CPU_BYTES = 512 << 20
_GPU_MATMUL = 8192
_CPU_MATMUL = 2048
_EFFORT = Effort(seconds=0.2, min_rounds=5, max_rounds=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Best measured rates.

    Attributes:
        read_bytes_per_s: memory read by a kernel that does nothing else.
        copy_bytes_per_s: a copy, bytes read plus bytes written.
        matmul_flops_per_s: a square matrix product of random numbers, by dtype. On a CPU the faster of
            that dtype and float32: without instructions for 16 bits a kernel widens its numbers.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]

    def floor_us(self, workload: Workload) -> float | None:
        """No version of a workload runs much faster than this; None where nothing is moved.

        The larger of its bytes over the bandwidth (a write is held against the copy) and its FLOPs
        over the matrix rate.
        """
        if workload.num_bytes == 0:
            return None
        write = workload.kind == "write"
        bandwidth = self.copy_bytes_per_s if write else self.read_bytes_per_s
        seconds = workload.num_bytes / bandwidth
        if workload.num_flops:
            seconds = max(seconds, workload.num_flops / self.matmul_flops_per_s[workload.dtype])
        return seconds * 1e6


def measure(
    device: torch.device,
    dtypes: Iterable[str],
    *,
    num_bytes: int | None = None,
    size: int | None = None,
) -> Ceilings:
    """Measure the ceilings of a device.

    Args:
        device: a GPU or the CPU, with the threads torch is set to.
        dtypes: keys of `DTYPES` whose matrix rate is wanted.
        num_bytes: of the buffers; None: far beyond any cache.
        size: of the square matrices; None: large enough to fill the device.
    """
    gpu = device.type == "cuda"
    num_bytes = num_bytes or (_GPU_BYTES if gpu else _CPU_BYTES)
    size = size or (_GPU_MATMUL if gpu else _CPU_MATMUL)
    x = torch.randn(num_bytes // 4, device=device)
    y = torch.empty_like(x)
    read_us = min(_best_us(call, device) for call in _reads(x))
    copy_us = _best_us(lambda: y.copy_(x), device)
    wanted = sorted(set(dtypes))
    measured = {name: _matmul_flops_per_s(device, name, size) for name in wanted}
    if not gpu and any(DTYPES[name].itemsize == 2 for name in wanted):
        widened = _matmul_flops_per_s(device, "float32", size)
        measured = {name: max(rate, widened) for name, rate in measured.items()}
    moved = x.numel() * x.element_size()
    return Ceilings(
        read_bytes_per_s=moved / read_us * 1e6,
        copy_bytes_per_s=2 * moved / copy_us * 1e6,
        matmul_flops_per_s=measured,
    )


def _matmul_flops_per_s(device: torch.device, dtype: str, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    return 2 * size**3 / _best_us(lambda: a @ b, device) * 1e6


def _reads(x: torch.Tensor) -> list[Callable[[], object]]:
    """Several ways to read everything; the fastest is the ceiling."""
    if x.device.type != "cuda":
        return [x.sum, x.amax]
    try:
        from attnkit.bench.kernels import read_kernel
    except ModuleNotFoundError:
        return [x.sum, x.amax]
    calls: list[Callable[[], object]] = []
    for block, num_blocks, num_warps in ((4096, 8, 8), (4096, 16, 8), (2048, 32, 4)):
        grid = x.numel() // (block * num_blocks)
        sums = torch.empty(grid, device=x.device)

        def call(
            block: int = block,
            num_blocks: int = num_blocks,
            num_warps: int = num_warps,
            grid: int = grid,
            sums: torch.Tensor = sums,
        ) -> None:
            launch: Any = read_kernel[(grid,)]
            launch(x, sums, BLOCK=block, NUM_BLOCKS=num_blocks, num_warps=num_warps)

        calls.append(call)
    return calls


def _best_us(call: Callable[[], object], device: torch.device) -> float:
    """A ceiling is what the device can do, so the tenth percentile: the best without the luckiest."""
    call()
    if device.type == "cuda":
        return time_cold({"": call}, _EFFORT, device)[""].p10_us
    return time_host({"": [call]}, _EFFORT)[""].p10_us


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, at least one."""
    return statistics.geometric_mean(values)
