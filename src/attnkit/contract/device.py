"""What a device can do, as a value: selection and `explain` need no device to talk about one.

In: a torch device, or a name such as "sm_90". Out: `DeviceCapability`, which backends receive in
`supports_compute_capability` and `supports_combination`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from attnkit.errors import ConfigurationError


class DeviceCapability(NamedTuple):
    """A device class: its platform and, for CUDA, its compute capability.

    Tuples compare field by field, so `capability >= (9, 0)` works for CUDA devices. A CPU is (0, 0),
    which is below every GPU; ask `platform` before you read the numbers.

    Attributes:
        major, minor: of the compute capability.
        platform: "cuda" or "cpu".
    """

    major: int
    minor: int
    platform: str = "cuda"

    @classmethod
    def cpu(cls) -> DeviceCapability:
        """The capability of the host processor."""
        return cls(0, 0, "cpu")

    @classmethod
    def of(cls, device: torch.device | str) -> DeviceCapability:
        """The capability of a device that is present.

        Raises:
            ConfigurationError: the device type is neither cpu nor cuda, or there is no such device.
        """
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError, ValueError):
            raise ConfigurationError(
                f"device {device!r} is not known; use 'cpu', 'cuda' or 'cuda:N'"
            ) from None
        if device.type == "cpu":
            return cls.cpu()
        if device.type != "cuda":
            raise ConfigurationError(f"device {device} is not supported; use 'cpu' or 'cuda'")
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"device {device} was asked for, but torch sees no CUDA device; use device='cpu'"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigurationError(
                f"device {device} was asked for, but torch sees {torch.cuda.device_count()} CUDA "
                "devices; give a lower number"
            )
        return cls(*torch.cuda.get_device_capability(device))

    @classmethod
    def parse(cls, name: str) -> DeviceCapability:
        """Read "cpu" or "sm_90" / "sm90" / "9.0"; the device need not be present.

        Raises:
            ConfigurationError: the name has another form.
        """
        if name == "cpu":
            return cls.cpu()
        match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", name)
        if match is None:
            raise ConfigurationError(
                f"device {name!r} is not known; use 'cpu' or a form like 'sm_90'"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return "cpu" if self.platform == "cpu" else f"sm_{self.major}{self.minor}"

    def to_int(self) -> int:
        """Major and minor as one number: 9.0 is 90."""
        return self.major * 10 + self.minor


KNOWN_DEVICES = tuple(
    map(DeviceCapability.parse, ("cpu", "sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"))
)
"""What refusals and the matrix ask about to say where a backend runs; others may work too."""
