"""KernelCall: a kernel with everything it is launched with.

In: the jitted function and its arguments, by name. Out: a launch, on the device of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A kernel with everything it is launched with.

    Attributes:
        kernel: the jitted function.
        grid: programs along each axis.
        arguments: by parameter name; None switches a feature off, where the kernel has it.
        options: of the compiler: warps of a program, stages, ...
        device: of the tensors among the arguments.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    device: torch.device

    def launch(self) -> Any:
        """Start it, unless there is nothing to do. Returns what was compiled for it, if anything was."""
        if not all(self.grid):
            return None
        with current(self.device):
            return self.kernel[self.grid](**self.arguments, **self.options)


def current(device: torch.device) -> torch.cuda.device:
    """Makes it the current device, on which Triton launches whatever the tensors are on."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
