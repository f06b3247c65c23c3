"""Upload: several small integer arrays through one host buffer and one copy to the device.

In: numpy arrays, each with the width it shall have. Out: their tensors on the host and on the device.
A step's lengths, tables and slots go up this way, since each copy by itself costs as much as all.
"""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 32
"""Int32 elements between the starts of two parts: 128 bytes, so that every part is aligned for vector
loads and a kernel that specialises on alignment is compiled once."""


class Upload:
    """Collects arrays, then sends them together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[np.ndarray] = []

    def add(self, values: np.ndarray, dtype: type[np.integer]) -> int:
        """Take a copy of the values, flattened, as int32 or int64; returns the part's number."""
        self._parts.append(np.ascontiguousarray(values, dtype=dtype).reshape(-1))
        return len(self._parts) - 1

    def send(
        self, into: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parts on the host, and on the device after one copy (none on a CPU), by their number.

        The host's are pinned where the device is a GPU, and stay as they are.

        Args:
            into: int32, on the device, at least as long as the parts (`room_for`): they go to its
                beginning, each to a place that depends on the sizes of the parts before it alone.
        """
        sizes = [part.nbytes // 4 for part in self._parts]
        offsets = np.cumsum([0] + [room_for(size) for size in sizes])
        pinned = self._device.type == "cuda"
        host = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=pinned)
        packed = host.numpy()
        for part, offset, size in zip(self._parts, offsets, sizes, strict=False):
            packed[offset : offset + size] = part.view(np.int32)
        if into is None:
            moved = host.to(self._device, non_blocking=True)
        else:
            assert into.numel() >= host.numel(), f"{host.numel()} words into {into.numel()}"
            moved = into[: host.numel()].copy_(host, non_blocking=True)

        def split(buffer: torch.Tensor) -> list[torch.Tensor]:
            pieces = [buffer[o : o + n] for o, n in zip(offsets, sizes, strict=False)]
            return [
                piece.view(torch.int64) if part.itemsize == 8 else piece
                for part, piece in zip(self._parts, pieces, strict=True)
            ]

        return split(host), split(moved)


def room_for(num_words: int) -> int:
    """Int32 elements that a part of so many takes up in an upload."""
    return -(-num_words // _ALIGNMENT) * _ALIGNMENT
