"""Which transformers the bridge has been tested with.

In: the installed version. Out: nothing, or a warning that names the range.
"""

from __future__ import annotations

import re
import warnings

OLDEST, NEWEST = (5, 19), (5, 24)
"""Minor versions; 5.24 is where models' `past_key_values` became `cache`."""


def check_version(version: str) -> None:
    """Warn once a call where `version` is outside of the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        warnings.warn(
            f"attnkit's bridge was tested with transformers {_name(OLDEST)} to {_name(NEWEST)}, and "
            f"this is {version}: check its output, or install a version of that range",
            RuntimeWarning,
            stacklevel=3,
        )


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
