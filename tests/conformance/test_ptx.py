"""What is found in a kernel's text."""

from __future__ import annotations

from attnkit.conformance.ptx import unset_halves

HALVES = """
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<4>;
	.reg .b32 	%r<9>;
	mov.u32 	%r1, %tid.x;
	setp.lt.u32 	%p1, %r1, 8;
	cvt.rn.satfinite.e4m3x2.f32  %rs1, %r1, %r1;
	mov.b32 	%r2, {%rs1, %rs2};	// the half %rs3 is not needed
	@%p1 st.shared.v2.b32 	[%r2], {%r1, %r2};
	ld.shared.v2.b32 	{%r3, %r4}, [%r2];
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r5, %r6}, %r3, %r4, %p1, 1, 1;
	prmt.b32 	%r7, %r3, %r8, 0x3120U;	// no byte of %r8
	@!%p2 bra 	$L__BB0_2;
"""


def test_a_half_that_nothing_sets() -> None:
    assert unset_halves(HALVES) == {"%rs2"}


def test_what_is_set_anywhere_is_set() -> None:
    later = HALVES + "{ mov.b16 \t%rs2, 0; }\n"
    assert unset_halves(later) == set()
    assert unset_halves(".visible .entry empty()") == set()
