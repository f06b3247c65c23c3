"""The hopper backend on a CPU: Gluon kernels in the emulator, Triton kernels in the interpreter."""

from __future__ import annotations

import emulator
import pytest

from attnkit.backends.hopper import launch
from attnkit.backends.hopper.backend import HopperBackend
from attnkit.contract import DeviceCapability


class EmulatedHopper(HopperBackend):
    """The backend as it is, on a device that it does not claim."""

    @classmethod
    def is_available(cls) -> str | None:
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> type[HopperBackend]:
    """The backend class, its attention kernels replaced by emulated ones."""
    modules = emulator.load("tile", "prefill", "decode")
    monkeypatch.setattr(launch, "prefill_kernel", modules["prefill"].prefill_kernel)
    monkeypatch.setattr(launch, "decode_kernel", modules["decode"].decode_kernel)
    monkeypatch.setattr(launch, "TensorDescriptor", emulator.TensorDescriptor)
    return EmulatedHopper
