"""The one door to Gluon: its names as this backend uses them, on Triton 3.6 and on newer releases.

In: whichever Triton is installed. Out: names that mean the same on all of them. Device files import
from here only, so a renamed call is absorbed in one place, and the tests can put an emulator here.

Seen so far: `thread_barrier` became `barrier` and `_reinterpret` became `reinterpret` after 3.6;
`tma.async_copy_*` became `tma.async_load` and `tma.async_store`, and the old names now raise.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "barrier",
    "fade_rows",
    "fence_async_shared",
    "float16_of_codes",
    "float16_of_pairs",
    "gl",
    "gluon",
    "let_next_start",
    "mbarrier",
    "mma_v2",
    "named_barrier_arrive",
    "named_barrier_sync",
    "opaque",
    "reciprocal",
    "reinterpret",
    "square_root",
    "tma_load",
    "triton",
    "wait_for_kernel_before",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier  # type: ignore[attr-defined]
"""All threads of the partition meet; shared memory written before is seen after."""

tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, destination): one box; its bytes count on the barrier."""


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
    """The same shared memory with another shape and layout."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def _run(x, ASM: gl.constexpr):
    """x, an int32 scalar, after instructions that are run where they stand. $0 is for it, $1 it."""
    return gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


# Gluon has no named barriers. Ids below 8 are left to the compiler: 0 is the default partition's, 1
# switches warp specialisation, 2 and up belong to the workers.


@gluon.constexpr_function
def _barrier_asm(call: str, barrier_id: int, num_threads: int):
    return f"bar.{call} {barrier_id}, {num_threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier_sync(x, ID: gl.constexpr, THREADS: gl.constexpr):
    """Wait until THREADS threads have come to barrier ID. `x` is any int32 scalar."""
    _run(x, _barrier_asm("sync", ID, THREADS))


@gluon.jit
def named_barrier_arrive(x, ID: gl.constexpr, THREADS: gl.constexpr):
    """Count this partition's threads at barrier ID without waiting. `x` is any int32 scalar."""
    _run(x, _barrier_asm("arrive", ID, THREADS))


# Programmatic dependent launch (option `launch_pdl` of the later kernel).


@gluon.jit
def let_next_start(x):
    """The next kernel, if it was launched so, starts once all programs of this one have come here. `x`
    is any int32 scalar."""
    _run(x, "griddepcontrol.launch_dependents; mov.b32 $0, $1;")


@gluon.jit
def wait_for_kernel_before(x):
    """The kernel before this one is over, and its writes are seen. `x` is any int32 scalar."""
    _run(x, "griddepcontrol.wait; mov.b32 $0, $1;")


@gluon.jit
def opaque(x):
    """The int32 scalar x, as a value the compiler knows nothing about and computes in place."""
    return _run(x, "mov.b32 $0, $1;")


@gluon.jit
def reciprocal(x):
    """1 / x to one unit in the last place, in one instruction where a division takes eight."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def float16_of_codes(codes):
    """float8_e4m3fn codes as float16, exactly; bytes of which four stand side by side in a thread."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [codes],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def float16_of_pairs(pairs):
    """Low and high bytes of int16 pairs of such codes, likewise: four codes in three instructions."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, $2, 0x3120; mov.b32 {a, b}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def square_root(x):
    """Square root to about one unit in the last place, in one instruction."""
    return gl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _fade_asm(num: int):
    muls = "".join(f"mul.rn.f32 ${i}, ${i}, ${2 * num + i};" for i in range(num))
    return (
        "{ .reg .pred p, q;"
        f"setp.neu.f32 p, ${2 * num}, 0f3F800000; setp.neu.or.f32 q, ${2 * num + 2}, 0f3F800000, p;"
        f"vote.sync.any.pred p, q, 0xffffffff; @!p bra done; {muls} done: }}"
    )


@gluon.constexpr_function
def _fade_constraints(num: int):
    outs, ties = ",".join(["=r"] * num), ",".join(map(str, range(num)))
    return f"{outs},{ties},{','.join(['r'] * num)}"


@gluon.jit
def fade_rows(acc, fade, NUM: gl.constexpr):
    """acc * fade, a factor for each row, which warps whose rows all have 1 jump over.

    acc: as a warpgroup's product lays it out, NUM or a multiple of it in a thread: two of a row, two of
    the other, and so on.
    """
    ASM: gl.constexpr = _fade_asm(NUM)  # pyright: ignore[reportAssignmentType]
    CONSTRAINTS: gl.constexpr = _fade_constraints(NUM)  # pyright: ignore[reportAssignmentType]
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [acc, gl.expand_dims(fade, 1)], dtype=gl.float32, is_pure=True, pack=NUM
    )
