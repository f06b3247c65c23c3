"""TritonIndexKernels: choosing keys on a GPU without waiting for it.

In: a step's small keys and queries, a cache and the batch. Out: launched kernels, repeated from step to
step on a GPU (`repeat`). Can be asked questions where Triton is not installed.
"""

from __future__ import annotations

import torch

from attnkit.backends.repeat import Repeats, kind_of
from attnkit.backends.triton.backend import TritonBackend
from attnkit.backends.triton.mla_prefill import rows_of
from attnkit.contract import CommonAttentionMetadata, DeviceCapability

_MAX_HEADS, _MAX_HEAD_SIZE = 128, 256


class TritonIndexKernels:
    """Any GPU that Triton compiles for (sm_80 and later), or its interpreter."""

    is_capturable = True

    def __init__(self) -> None:
        self._repeats = Repeats()

    @staticmethod
    def refusal(num_heads: int, head_size: int, device: torch.device) -> str | None:
        absent = TritonBackend.unavailable_reason()
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

    def write(self, k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        # Here, so that the class can be asked questions where Triton is not installed.
        from attnkit.backends.triton import index_launch
        from attnkit.backends.triton.launch import gpu_of

        k = rows_of(k)
        self._repeats.launch(
            ("write", kind_of(k), slot_mapping.dtype),
            cache,
            index_launch.index_write_grid(slot_mapping),
            index_launch.index_write_changes(k, slot_mapping),
            lambda: index_launch.index_write_call(
                k, index_launch.IndexPages.of(cache, k.shape[1]), slot_mapping, gpu_of(k.device)
            ),
        )

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        batch: CommonAttentionMetadata,
        lists: torch.Tensor,
    ) -> None:
        from attnkit.backends.triton import index_launch
        from attnkit.backends.triton.launch import gpu_of

        if cache.dtype is not torch.uint8:
            q = q.to(torch.promote_types(q.dtype, cache.dtype))
        gpu = gpu_of(q.device)
        step = index_launch.IndexStep(
            q=rows_of(q),
            weights=rows_of(weights),
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            lists=lists,
        )
        kind = step.kind
        for part in step.parts(cache.shape[1], batch.max_seq_len):
            if part.is_scored:
                self._repeats.launch(
                    ("score", *kind),
                    cache,
                    index_launch.index_score_grid(step, part, gpu),
                    index_launch.index_score_changes(step, part, gpu),
                    lambda part=part: index_launch.index_score_call(
                        step, part, index_launch.IndexPages.of(cache, q.shape[2]), gpu
                    ),
                )
            for name, changes in index_launch.index_list_changes(step, part, gpu).items():
                self._repeats.launch(
                    (name, *kind),
                    cache,
                    index_launch.index_list_grid(part),
                    changes,
                    lambda part=part, name=name: index_launch.index_list_calls(step, part, gpu)[
                        name
                    ],
                )
