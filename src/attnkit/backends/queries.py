"""Queries of a batch, as kernels find whose they are.

In: query_start_loc and seq_lens on the device. Out: per query its request and what it sees. Device code,
shared by the kernels that choose keys and by those that find the rows of chosen ones.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def seen_by_query(query_start_loc_ptr, seq_lens_ptr, num_reqs, query, BLOCK_R: tl.constexpr):
    """The request of a query, and how many of its keys the query sees; none where it is nobody's. What
    `mla.plan.seen_by_queries` says of all at once."""
    # A query's request is as far behind as there are requests that end before it.
    request = tl.zeros([], tl.int32)
    for first in range(0, num_reqs, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        end = tl.load(query_start_loc_ptr + 1 + r, mask=r < num_reqs, other=1 << 30)
        request += tl.sum((end <= query).to(tl.int32), 0)
    owned = request < num_reqs
    end = tl.load(query_start_loc_ptr + 1 + request, mask=owned, other=0)
    num_seen = tl.load(seq_lens_ptr + request, mask=owned, other=0) - end + query + 1
    return request, tl.where(owned, num_seen, 0)
