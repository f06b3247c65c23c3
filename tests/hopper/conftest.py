"""The hopper backend on a CPU: Gluon kernels in the emulator, Triton kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import emulator
import pytest

from attnkit.backends.hopper import latent_launch, launch, merge
from attnkit.backends.hopper.backend import HopperBackend
from attnkit.backends.hopper.mla import HopperMLABackend
from attnkit.backends.hopper.mla_sparse import HopperMLASparseBackend
from attnkit.backends.triton.interpreter import repair_small_floats
from attnkit.conformance import simulator
from attnkit.contract import DeviceCapability

repair_small_floats()  # The interpreter's, in which the backend is never asked to run.

KERNELS = {
    "prefill": launch,
    "decode": launch,
    "latent_codes": latent_launch,
    "latent_decode": latent_launch,
    "latent_narrow": latent_launch,
}
"""Device modules, each with a kernel of its name, and who launches it."""


class EmulatedHopper(HopperBackend):
    """The backend as it is, on a device that it does not claim."""

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


class EmulatedHopperMLA(HopperMLABackend):
    """Likewise, over latents."""

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


class EmulatedHopperMLASparse(HopperMLASparseBackend):
    """Likewise, over chosen keys."""

    @classmethod
    def unavailable_reason(cls) -> str | None:
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


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[str, str], str] = lambda name, source: source,
) -> None:
    """Put emulated attention kernels in the place of the compiled ones; `edit` as in `emulator.load`."""
    parts = (
        "coded_queries",
        "tile",
        "pieces",
        "row_tiles",
        "states",
        "latent_copies",
        "prefill_copies",
        "prefill_tile",
        "code_scores",
    )
    modules = emulator.load(*parts, *KERNELS, edit=edit)
    for name, host in KERNELS.items():
        monkeypatch.setattr(host, f"{name}_kernel", getattr(modules[name], f"{name}_kernel"))
        monkeypatch.setattr(host, "TensorDescriptor", emulator.TensorDescriptor)
    repair_small_floats()
    # Interpreted kernels begin when those before them are over.
    monkeypatch.setattr(merge, "gdc_wait", lambda: None)
    monkeypatch.setattr(simulator, "kernels_on", emulated_kernels_on)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> type[HopperBackend]:
    """The backend class, its attention kernels replaced by emulated ones."""
    emulate(monkeypatch)
    return EmulatedHopper


@pytest.fixture
def emulated_mla(monkeypatch: pytest.MonkeyPatch) -> type[HopperMLABackend]:
    """The backend over latents, likewise."""
    emulate(monkeypatch)
    return EmulatedHopperMLA


@pytest.fixture
def emulated_sparse(monkeypatch: pytest.MonkeyPatch) -> type[HopperMLASparseBackend]:
    """The backend over chosen keys, likewise."""
    emulate(monkeypatch)
    return EmulatedHopperMLASparse
