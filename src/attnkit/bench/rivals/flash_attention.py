"""FlashAttention: version 3 as vLLM or Dao's repository package it, version 2 as flash-attn.

In: pages (shared or a copy) or contiguous K and V. Out: one varlen call for any batch, with the split
plan of vLLM's build made beforehand, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from attnkit.backends.flash_attn import HOPPER, PACKAGE, VLLM, attend_pages
from attnkit.bench.contender import Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.rivals.pages import need, own_pages, refuse_coded, shared_pages
from attnkit.bench.workloads import ATTENTION_KINDS

Memory = Literal["shared", "own", "dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention3:
    """FlashAttention-3.

    Attributes:
        memory: our pages, a copy of them, or contiguous K and V.
    """

    name: str
    memory: Memory
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        module = need("cuda", inputs, VLLM, HOPPER)
        if workload.kind == "build":
            return self._prepare_plan(module, inputs)
        _only_attention(inputs)
        if self.memory == "dense":
            return self._prepare_dense(module, inputs)
        k, v, note = _paged(inputs, own=self.memory == "own")
        plan = None
        if module.__name__ == VLLM:
            plan, note = _scheduler_metadata(module, inputs), f"{note}, vLLM's build"
        return Prepared(run=_paged_call(module, inputs, k, v, scheduler_metadata=plan), note=note)

    def _prepare_dense(self, module: ModuleType, inputs: Inputs) -> Prepared:
        if inputs.workload.kind != "prefill":
            raise Refused("contiguous K and V are measured on prefill only")
        k, v = inputs.dense()
        batch = inputs.batch
        starts = _starts(inputs)
        # vLLM's build takes the lengths before the offsets of K, Dao's after them, and only vLLM's
        # asks for a version.
        if module.__name__ == VLLM:
            return Prepared(
                run=lambda: module.flash_attn_varlen_func(
                    inputs.query,
                    k,
                    v,
                    batch.max_query_len,
                    batch.query_start_loc,
                    batch.max_seq_len,
                    cu_seqlens_k=starts,
                    causal=True,
                    fa_version=3,
                ),
                note="contiguous copies, vLLM's build",
            )
        return Prepared(
            run=lambda: module.flash_attn_varlen_func(
                inputs.query,
                k,
                v,
                batch.query_start_loc,
                starts,
                batch.max_query_len,
                batch.max_seq_len,
                causal=True,
            ),
            note="contiguous copies",
        )

    def _prepare_plan(self, module: ModuleType, inputs: Inputs) -> Prepared:
        if module.__name__ != VLLM or self.memory != "shared":
            raise Refused("makes no plan of its own")
        return Prepared(
            run=lambda: _scheduler_metadata(module, inputs),
            note="get_scheduler_metadata",
            capturable=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention2:
    """FlashAttention-2 as the package flash-attn has it; its pages are multiples of 256 tokens."""

    name: str
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        module = need("cuda", inputs, PACKAGE)
        _only_attention(inputs)
        batch = inputs.batch
        starts = _starts(inputs)
        call: Callable[..., torch.Tensor] = module.flash_attn_varlen_func
        if inputs.workload.block_size % 256:
            if inputs.workload.kind != "prefill":
                raise Refused(
                    f"page {inputs.workload.block_size}: flash-attn takes multiples of 256 only"
                )
            k, v = inputs.dense()
        else:
            k, v, note = _paged(inputs, own=False)
            return Prepared(run=_paged_call(module, inputs, k, v, key_start_loc=starts), note=note)
        return Prepared(
            run=lambda: call(
                inputs.query,
                k,
                v,
                batch.query_start_loc,
                starts,
                batch.max_query_len,
                batch.max_seq_len,
                causal=True,
            ),
            note="contiguous copies",
        )


def _paged_call(
    module: ModuleType,
    inputs: Inputs,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_start_loc: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
) -> Callable[[], torch.Tensor]:
    """The call that the flash_attn backend makes too."""
    batch = inputs.batch
    return lambda: attend_pages(
        module,
        inputs.query,
        k,
        v,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table_tensor,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=inputs.workload.head_size**-0.5,
        key_start_loc=key_start_loc,
        scheduler_metadata=scheduler_metadata,
    )[0]


def _only_attention(inputs: Inputs) -> None:
    workload = inputs.workload
    if workload.kind not in ATTENTION_KINDS:
        raise Refused("attention only")
    refuse_coded(inputs)
    if workload.cache_torch_dtype != workload.torch_dtype:
        raise Refused(f"{workload.kv_cache_dtype} pages need queries of the same format")


def _paged(inputs: Inputs, *, own: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    if own:
        k, v = own_pages(inputs).unbind(1)
        return k, v, "a copy of the pages in its own layout"
    k, v = shared_pages(inputs)
    return k, v, f"the same {inputs.any_layout.name} pages"


def _starts(inputs: Inputs) -> torch.Tensor:
    """int32 (num_reqs + 1,): offsets of requests in packed keys."""
    zero = inputs.batch.seq_lens.new_zeros(1)
    return torch.cat((zero, inputs.batch.seq_lens.cumsum(0))).to(torch.int32)


def _scheduler_metadata(module: ModuleType, inputs: Inputs) -> torch.Tensor:
    workload, batch = inputs.workload, inputs.batch
    return module.get_scheduler_metadata(
        batch_size=workload.num_reqs,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        num_heads_q=workload.num_heads,
        num_heads_kv=workload.num_kv_heads,
        headdim=workload.head_size,
        cache_seqlens=batch.seq_lens,
        qkv_dtype=workload.torch_dtype,
        cu_seqlens_q=batch.query_start_loc,
        page_size=workload.block_size,
        causal=True,
    )


FA3 = FlashAttention3(name="fa3", memory="shared")
FA3_OWN = FlashAttention3(name="fa3-own", memory="own")
FA3_DENSE = FlashAttention3(name="fa3-dense", memory="dense")
FA2 = FlashAttention2(name="fa2")
