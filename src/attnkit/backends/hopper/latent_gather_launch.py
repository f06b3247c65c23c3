"""Launchers of the gather kernels, beside `latent_launch`.

In: lists, lengths and pages of a step. Out: frozen `KernelCall`s that fill the tensors of a
`ChosenWork`. `gather_changes` are what differs between steps (`repeat`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from attnkit.backends.hopper.latent_gather import chosen_lens_kernel, gather_latents_kernel
from attnkit.backends.hopper.latent_launch import LatentWork
from attnkit.backends.hopper.tuning import CHOSEN_PAGE, chosen_pages
from attnkit.backends.kernel_call import KernelCall

_ROWS = 16
"""Rows of a program: 18 KiB on their way, and 128 programs for a list of 2,048."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenWork:
    """Some neighbouring queries of a step, and how they are shared out.

    Attributes:
        first_token: the first of them.
        max_num_tokens: no more of them.
        owners: int32 (max_num_tokens, 2): request, and keys that the query sees; 0 where it is nobody's.
        work: the decode's, of as many keys as a list can name.
    """

    first_token: int
    max_num_tokens: int
    owners: torch.Tensor
    work: LatentWork

    @property
    def end_token(self) -> int:
        """One past the last of them."""
        return self.first_token + self.max_num_tokens


def chosen_lens_call(
    owners: torch.Tensor,
    lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_token: int,
    size: int,
    *,
    distinct: bool,
) -> KernelCall:
    """What the plan of some queries is made of.

    Args:
        owners: int32 (T, 2), to be filled as in `ChosenWork`.
        lens: int32 (T,), to be filled: keys that a query's list can name at most.
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        first_token: of these queries.
        size: of the lists.
        distinct: no list names a position twice.
    """
    return KernelCall(
        kernel=chosen_lens_kernel,
        grid=(lens.shape[0],),
        arguments={
            "owners_ptr": owners,
            "lens_ptr": lens,
            "query_start_loc_ptr": query_start_loc,
            "seq_lens_ptr": seq_lens,
            "num_reqs": seq_lens.shape[0],
            "first_token": first_token,
            "size": size,
            "DISTINCT": distinct,
            "BLOCK_R": 128,
        },
        options={"num_warps": 1},
        device=seq_lens.device,
    )


def gather_call(
    lists: torch.Tensor,
    table: torch.Tensor,
    pages: Any,
    rows: torch.Tensor,
    owners: torch.Tensor,
    work: LatentWork,
    groups: int,
) -> KernelCall:
    """The gather kernel over the lists of some queries.

    Args:
        lists: int32 (T, k), last stride 1.
        table: int32 (R, W), blocks of each request.
        pages: `LatentPages` of the cache, whose blocks and rows lie multiples of 16 bytes apart.
        rows: (at least T * ceil(k / 64), 64, 576) 16-bit numbers, to be filled: pages of each query.
        owners: int32 (at least T, 2).
        work: its records are told how many rows each query has.
        groups: row tiles that the heads of one token take.
    """
    latent = pages.latent
    units = [x * latent.element_size() for x in latent.stride()[:2]]
    assert not any(x % 16 for x in units), f"rows of the cache lie {latent.stride()} apart"
    assert lists.stride(1) == 1 or lists.shape[1] <= 1, f"lists have strides {lists.stride()}"
    return KernelCall(
        kernel=gather_latents_kernel,
        grid=gather_grid(lists),
        arguments={
            **gather_changes(lists, table, rows, owners, work),
            "latent_ptr": latent,
            "rotated_ptr": pages.rotated,
            "tile_scales_ptr": pages.tile_scales,
            "page_units": units[0] // 16,
            "row_units": units[1] // 16,
            "PAGE_SIZE": latent.shape[1],
            "RANK": latent.shape[2],
            "ROPE": pages.rotated.shape[2],
            "CODES": int(pages.codes),
            "GROUPS": groups,
            "ROWS": _ROWS,
            "BLOCK_K": block_k(lists),
        },
        # Eight programs a multiprocessor, so that those of eight lists of 2,048 run at once.
        options={"num_warps": 4, "num_stages": 1, "maxnreg": 64},
        device=rows.device,
    )


def gather_grid(lists: torch.Tensor) -> tuple[int, int]:
    """Programs of the kernel; a query without a list has one too, which says so."""
    return lists.shape[0], max(1, triton.cdiv(lists.shape[1], _ROWS))


def block_k(lists: torch.Tensor) -> int:
    """Places of a list that are counted at once."""
    return min(2048, max(16, triton.next_power_of_2(lists.shape[1])))


def gather_changes(
    lists: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    work: LatentWork,
) -> dict[str, Any]:
    """Arguments of `gather_call` that differ from one step to the next."""
    return {
        "lists_ptr": lists,
        "owners_ptr": owners,
        "table_ptr": table,
        "rows_ptr": rows,
        "share_ptr": work.share,
        "pieces_ptr": work.pieces,
        "units_ptr": work.units,
        "size": lists.shape[1],
        "lists_stride": lists.stride(0),
        "table_stride": table.stride(0),
        "room": chosen_pages(lists.shape[1]) * CHOSEN_PAGE,
    }
