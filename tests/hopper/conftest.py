"""The hopper backend on a CPU: Gluon kernels in the emulator, Triton kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import emulator
import pytest

from attnkit.backends.hopper import latent_launch, launch
from attnkit.backends.hopper.backend import HopperBackend
from attnkit.conformance import simulator
from attnkit.contract import DeviceCapability


class EmulatedHopper(HopperBackend):
    """The backend as it is, on a device that it does not claim."""

    @classmethod
    def is_available(cls) -> str | None:
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


@contextmanager
def emulated_kernels_on(
    tape: simulator.Tape, interpreted: Callable[..., Any] = simulator.kernels_on
) -> Iterator[None]:
    """Emulated kernels go on the tape of a simulated graph too."""
    kernel_of_grid = emulator.Kernel.__getitem__

    def recorded(kernel: emulator.Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: tape.launch(kernel_of_grid(kernel, grid), **arguments)

    with interpreted(tape), mock.patch.object(emulator.Kernel, "__getitem__", recorded):
        yield


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> type[HopperBackend]:
    """The backend class, its attention kernels replaced by emulated ones."""
    modules = emulator.load(
        "tile", "pieces", "states", "prefill", "decode", "latent_decode", "latent_narrow"
    )
    monkeypatch.setattr(launch, "prefill_kernel", modules["prefill"].prefill_kernel)
    monkeypatch.setattr(launch, "decode_kernel", modules["decode"].decode_kernel)
    for name in ("latent_decode", "latent_narrow"):
        kernel = getattr(modules[name], f"{name}_kernel")
        monkeypatch.setattr(latent_launch, f"{name}_kernel", kernel)
    for module in (launch, latent_launch):
        monkeypatch.setattr(module, "TensorDescriptor", emulator.TensorDescriptor)
    monkeypatch.setattr(simulator, "kernels_on", emulated_kernels_on)
    return EmulatedHopper
