"""TritonIndexKernels: choosing keys on a GPU without waiting for it.

In: a step's small keys and queries, a cache and the batch. Out: launched kernels. Can be asked questions
where Triton is not installed.
"""

from __future__ import annotations

import torch

from attnkit.backends.triton.backend import TritonBackend
from attnkit.backends.triton.mla_prefill import rows_of
from attnkit.contract import CommonAttentionMetadata, DeviceCapability

_MAX_HEADS, _MAX_HEAD_SIZE = 128, 256


class TritonIndexKernels:
    """Any GPU that Triton compiles for (sm_80 and later), or its interpreter."""

    is_capturable = True

    @staticmethod
    def refusal(num_heads: int, head_size: int, device: torch.device) -> str | None:
        absent = TritonBackend.is_available()
        if absent is not None:
            return absent
        if not TritonBackend.supports_compute_capability(DeviceCapability.of(device)):
            return f"Triton does not compile for {device}"
        if num_heads > _MAX_HEADS or head_size > _MAX_HEAD_SIZE:
            return (
                f"{num_heads} heads of {head_size} are not supported (allowed: {_MAX_HEADS} of "
                f"{_MAX_HEAD_SIZE})"
            )
        return None

    @staticmethod
    def write(k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        # Here, so that the class can be asked questions where Triton is not installed.
        from attnkit.backends.triton.index_launch import IndexPages, index_write_call

        pages = IndexPages.of(cache, k.shape[1])
        index_write_call(rows_of(k), pages, slot_mapping).launch()

    @staticmethod
    def choose(
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        batch: CommonAttentionMetadata,
        lists: torch.Tensor,
    ) -> None:
        from attnkit.backends.triton.index_launch import IndexPages, index_choose_calls
        from attnkit.backends.triton.launch import gpu_of

        pages = IndexPages.of(cache, q.shape[2])
        if pages.scales is None:
            q = q.to(torch.promote_types(q.dtype, cache.dtype))
        calls = index_choose_calls(
            rows_of(q),
            rows_of(weights),
            pages,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table_tensor,
            lists,
            max_seq_len=batch.max_seq_len,
            gpu=gpu_of(q.device),
        )
        for call in calls:
            call.launch()
