"""Device code of the bench: a kernel that does nothing but read memory.

In: a pointer to numbers. Out: one sum per program, so that no load can be optimised away. Launched by
`roofline`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_kernel(x_ptr, sum_ptr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    first_ptr = x_ptr + program * NUM_BLOCKS * BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(NUM_BLOCKS):
        total += tl.load(first_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sum_ptr + program, tl.sum(total))
