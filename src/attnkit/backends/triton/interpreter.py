"""Triton's interpreter: whether it is asked for, repairs without which its small floats are wrong, and
shortcuts without which it takes twice as long.

In: the environment variable TRITON_INTERPRET. Out: an answer, and a patched interpreter in this process.
Importing this file does not need Triton.

The interpreter holds bfloat16 as bit patterns in uint16. It multiplies the patterns in `tl.dot`, and
cuts bits off instead of rounding when it narrows float32 (Triton 3.6 to 3.9; upstream says it does not
support bfloat16). Loads, stores and widening are right, so kernels that widen before any arithmetic
of their own are right once these two are. float8 codes it reads and makes without infinity and NaN.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


def repair_small_floats() -> None:
    """Multiply and round bfloat16, read and make float8 as a GPU does. Repeating it does nothing
    more."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder.create_dot, "__wrapped__"):
        return
    create_dot, cast_impl = builder.create_dot, builder.cast_impl
    fp_to_fp = builder.create_fp_to_fp

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    @functools.wraps(create_dot)
    def dot(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        # Products of two bfloat16 are exact in float32.
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            a, b = widened(a), widened(b)
        return create_dot(self, a, b, acc, *precision)

    @functools.wraps(cast_impl)
    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar in (tl.float32, tl.int8):
            numbers = src.data.astype(np.float32)
            return interpreter.TensorHandle(_to_bfloat16(numbers), tl.bfloat16)
        return cast_impl(self, src, dst_type)

    @functools.wraps(fp_to_fp)
    def convert(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        kind, wanted = src.dtype.scalar, dst_type.scalar
        if wanted in (tl.float8e4nv, tl.float8e5) and kind == tl.float32:
            return interpreter.TensorHandle(_to_float8(src.data, wanted == tl.float8e5), wanted)
        if kind not in (tl.float8e4nv, tl.float8e5):
            return fp_to_fp(self, src, dst_type, rounding)
        numbers = interpreter.TensorHandle(_of_float8(src.data, kind == tl.float8e5), tl.float32)
        return numbers if wanted == tl.float32 else cast(self, numbers, dst_type)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = dot, cast, convert


def shorten() -> None:
    """Leave out what the interpreter does in vain. Repeating it does nothing more.

    Each call of a jitted function inside a kernel replaces the whole language, which the kernel's own
    start did. Each sum of small integers is computed again and compared, and nobody reads the result
    outside of debug mode. Together they are more than half of the kit's time (Triton 3.9).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if scope_type is None or hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    patch_lang: Any = interpreter._patch_lang
    semantic: Any = interpreter.interpreter_semantic

    @functools.cache
    def languages(function: Any) -> list[Any]:
        named = function.__globals__.values()
        return [lang for lang in (tl, tl.core) if any(value is lang for value in named)]

    @functools.wraps(patch_lang)
    def patch(function: Any) -> Any:
        if any(tl.core.is_builtin(lang.load) for lang in languages(function)):
            return patch_lang(function)
        return scope_type()  # Nothing to undo.

    interpreter._patch_lang = patch
    if not semantic.builder.options.debug:
        semantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _of_float8(codes: npt.NDArray[np.uint8], is_e5m2: bool) -> npt.NDArray[np.float32]:
    """The numbers of float8 codes."""
    dtype = torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn
    table = torch.arange(256).to(torch.uint8).view(dtype).float().numpy()
    return table[codes]


def _to_float8(x: npt.NDArray[np.float32], is_e5m2: bool) -> npt.NDArray[np.uint8]:
    """The nearest codes, ties to even; too large becomes the largest, NaN 0x7F."""
    dtype = torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn
    largest = torch.finfo(dtype).max
    codes = torch.from_numpy(x.copy()).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)


def _to_bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bit patterns of `x` rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
