"""Arguments: whether one value that a user gave is of the kind that was asked for.

In: its name, the value and what is allowed. Out: nothing, or an error of the caller's kind that says
all three. Whether values fit each other is the business of who takes them, but for a layer's heads.
"""

from __future__ import annotations

import inspect
import math
from numbers import Integral, Real
from typing import Any

import torch

from attnkit.errors import AttnkitError, BatchError, ConfigurationError


def check_count(
    name: str,
    value: Any,
    *,
    lowest: int = 1,
    highest: int | None = None,
    optional: bool = False,
    error: type[AttnkitError] = ConfigurationError,
) -> None:
    """A whole number of at least `lowest` and, if given, at most `highest`; Python's or numpy's.

    Args:
        optional: None is allowed too.
        error: to raise.
    """
    if optional and value is None:
        return
    if not is_count(value) or value < lowest or (highest is not None and value > highest):
        most = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise error(
            f"{name} {value!r} is not allowed; give a whole number, {most}{_or_none(optional)}"
        )


def check_number(name: str, value: Any, *, optional: bool = False) -> None:
    """A finite number.

    Raises:
        ConfigurationError: it is none.
    """
    if optional and value is None:
        return
    if not is_number(value):
        raise ConfigurationError(
            f"{name} {value!r} is not allowed; give a finite number{_or_none(optional)}"
        )


def check_flags(values: dict[str, Any], *, error: type[AttnkitError] = ConfigurationError) -> None:
    """True or False, nothing that stands for them: the text "no" would count as yes."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise error(f"{name} {value!r} is not allowed; give True or False")


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    """A string.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, str) and not (optional and value is None):
        raise ConfigurationError(
            f"{name} {value!r} is not allowed; give a string{_or_none(optional)}"
        )


def check_dtype(value: Any) -> None:
    """A `torch.dtype`, not its name.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, torch.dtype):
        raise ConfigurationError(
            f"dtype {value!r} is not allowed; give a torch.dtype, torch.bfloat16 say"
        )


def check_heads(
    num_heads: int, num_kv_heads: int, head_size: int, head_size_v: int | None = None
) -> None:
    """Refuse heads that no layer can have.

    Raises:
        ConfigurationError: a number or size below 1 or no whole number, or query heads that do not
            divide over the KV heads.
    """
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"{num_heads} query heads do not divide over {num_kv_heads} KV heads; "
            "give a num_kv_heads that divides num_heads"
        )
    check_count("head_size", head_size)
    check_count("head_size_v", head_size_v, optional=True)


def check_kind(
    name: str, value: Any, kind: type | tuple[type, ...], wanted: str, *, optional: bool = False
) -> None:
    """An instance of a class.

    Args:
        kind: the class, or several.
        wanted: what to give, in words.
        optional: None is allowed too.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, kind) and not (optional and value is None):
        raise ConfigurationError(
            f"{name} {_shown(value)} is not allowed; give {wanted}{_or_none(optional)}"
        )


def check_attribute(name: str, value: Any, attribute: str, *, optional: bool = False) -> None:
    """An object with an attribute, which is looked for and not looked at: a property may have nothing to
    say yet.

    Args:
        optional: None is allowed too.

    Raises:
        ConfigurationError: it has none.
    """
    if optional and value is None:
        return
    nothing = object()
    if inspect.getattr_static(value, attribute, nothing) is nothing:
        raise ConfigurationError(
            f"{name} {_shown(value)} is not allowed; give an object with {attribute}{_or_none(optional)}"
        )


def check_slots(slots: torch.Tensor, num_blocks: int, block_size: int) -> None:
    """Whether all slots lie in the cache or are -1; on a CPU, since looking at a GPU's waits for it.

    Raises:
        BatchError: one does not.
    """
    if slots.device.type != "cpu" or not slots.numel():
        return
    lowest, highest = (int(x) for x in slots.aminmax())
    if lowest < -1 or highest >= num_blocks * block_size:
        slot = lowest if lowest < -1 else highest
        raise BatchError(
            f"slot {slot} is outside the cache of {num_blocks} blocks of {block_size} tokens; give "
            f"slots from 0 to {num_blocks * block_size - 1}, or -1 to skip a token"
        )


def is_count(value: Any) -> bool:
    """A whole number by its type; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number that a float can hold, Python's or numpy's; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer beyond all floats.
        return False


def _shown(value: Any) -> str:
    """A value, or its type where that would fill a page."""
    text = repr(value)
    return text if len(text) <= 60 else f"of type {type(value).__name__}"


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
