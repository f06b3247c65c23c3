"""Read a request's tokens out of its pages, in torch, for any device and any strides.

In: pages and the ids that name them. Out: copies of the tokens, in order. GPU backends read pages
inside their kernels; this is what defines it.
"""

from __future__ import annotations

import torch

from attnkit.errors import BatchError


def read_tokens(pages: torch.Tensor, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A request's tokens in order: (num_tokens, ...).

    Args:
        pages: (num_blocks, block_size, ...).
        block_table: int (W,), the request's row; what stands behind its last block is not read.
        num_tokens: of the request.

    Raises:
        BatchError: the row has too few blocks, or an id is outside `pages` (on a GPU: a device-side
            assert).
    """
    num_needed = -(-num_tokens // pages.shape[1])
    if block_table.shape[0] < num_needed:
        raise BatchError(
            f"a request of {num_tokens} tokens needs {num_needed} blocks of {pages.shape[1]}, and its "
            f"row of the block table has {block_table.shape[0]}; give all of them"
        )
    blocks = block_table[:num_needed]
    check_block_ids(blocks, pages.shape[0])
    return pages.index_select(0, blocks).flatten(0, 1)[:num_tokens]


def check_block_ids(blocks: torch.Tensor, num_blocks: int) -> None:
    """Whether all ids name a block; on a CPU, since looking at a GPU's would wait for it.

    Raises:
        BatchError: one does not.
    """
    if blocks.device.type != "cpu" or not blocks.numel():
        return
    lowest, highest = (int(x) for x in blocks.aminmax())
    if lowest < 0 or highest >= num_blocks:
        raise BatchError(
            f"block id {lowest if lowest < 0 else highest} is outside the cache of {num_blocks} blocks; "
            f"give ids from 0 to {num_blocks - 1}"
        )


def check_pages(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
) -> None:
    """Whether the rows of all requests that have queries name blocks as far as their keys go; on a CPU,
    where kernels that are interpreted would read past the cache.

    Args:
        block_table: int (num_reqs, W).
        query_start_loc: int (num_reqs + 1,).
        kv_lens: int (num_reqs,).
        num_blocks: of the cache.
        block_size: tokens in one.

    Raises:
        BatchError: one does not.
    """
    if block_table.device.type != "cpu":
        return
    needed = torch.div(kv_lens + (block_size - 1), block_size, rounding_mode="floor")
    needed = needed * (query_start_loc.diff() > 0)
    width = block_table.shape[1]
    if needed.numel() and int(needed.max()) > width:
        raise BatchError(
            f"a request needs {int(needed.max())} blocks of {block_size}, and the block table is "
            f"{width} wide; give all of them"
        )
    check_block_ids(block_table[torch.arange(width) < needed[:, None]], num_blocks)
