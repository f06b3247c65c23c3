"""attend_prefill: the prefills of a batch over expanded keys and values, context piece by piece.

In: queries, this step's latents, the cache, a plan, and a prefill backend.
Out: attention, and its LSE. The step's own tokens attend to themselves; each chunk of the context is
gathered, expanded and attended to without a mask; the parts are merged by their LSE in float32, in
order, so at most one chunk of expanded keys and values exists at a time.
"""

from __future__ import annotations

import math

import torch

from attnkit.kvcache.formats import CacheFormat
from attnkit.kvcache.read import check_block_ids
from attnkit.mla.layer import LatentLayer
from attnkit.mla.plan import PrefillPart
from attnkit.mla.prefill_backend import MLAPrefillBackend
from attnkit.output_quant import QuantizedOutput


def attend_prefill(
    query: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    plan: PrefillPart,
    layer: LatentLayer,
    k_scale: torch.Tensor,
    backend: MLAPrefillBackend,
    output: torch.Tensor | QuantizedOutput,
) -> torch.Tensor:
    """Attend and return the LSE, float32 (num_tokens, num_heads).

    Args:
        query: (num_tokens, num_heads, qk_head_dim), of the plan.
        kv_c: (num_tokens, kv_lora_rank), of this step.
        k_pe: (num_tokens, qk_rope_head_dim), likewise.
        cache: (num_blocks, block_size, C); this step's tokens need not be in it yet.
        plan: of the prefills.
        layer: all tokens count as they read back from its cache, this step's too.
        k_scale: the layer's.
        backend: attends.
        output: (num_tokens, num_heads * v_head_dim), written in place. Memory for codes: only if
            `plan.is_one_part`, and the backend writes such.
    """
    own = _rows_of(plan, (query, kv_c, k_pe))
    own_latents = _read_back(own[1], own[2], layer.cache_format, k_scale, cache.dtype)
    key, value = layer.projection.expand(*own_latents)
    heads = (*query.shape[:2],)
    if plan.is_one_part:
        lse = query.new_empty(heads, dtype=torch.float32)
        if isinstance(output, QuantizedOutput):
            backend.run_prefill_to_codes(query, key, value, plan, output, lse)
        else:
            backend.run_prefill_new_tokens(query, key, value, plan, output.view(*heads, -1), lse)
        return lse
    assert isinstance(output, torch.Tensor), "parts are merged before there are codes"
    total = query.new_zeros(*heads, value.shape[-1], dtype=torch.float32)
    lse = query.new_full(heads, -math.inf, dtype=torch.float32)
    if plan.own_rows is None:
        backend.run_prefill_new_tokens(query, key, value, plan, total, lse)
    elif len(plan.own_rows):
        part, part_lse = total[plan.own_rows], lse[plan.own_rows]
        backend.run_prefill_new_tokens(own[0], key, value, plan, part, part_lse)
        total[plan.own_rows], lse[plan.own_rows] = part, part_lse
    for chunk in plan.chunks:
        latents = read_latents(cache, chunk.pages, layer, k_scale, query.dtype)
        key, value = layer.projection.expand(*latents)
        rows = query[chunk.rows]
        part = rows.new_empty(*rows.shape[:2], value.shape[-1], dtype=torch.float32)
        part_lse = rows.new_empty(rows.shape[:2], dtype=torch.float32)
        backend.run_prefill_context_chunk(rows, key, value, chunk, part, part_lse)
        merge_into(total[chunk.rows], lse[chunk.rows], part, part_lse)
    output.view(*heads, -1).copy_(total)
    return lse


def read_latents(
    cache: torch.Tensor,
    pages: torch.Tensor,
    layer: LatentLayer,
    k_scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and rotated parts of some pages.

    Args:
        cache: (num_blocks, block_size, C).
        pages: int64 or int32 (n,), block ids.
        layer: whose cache it is.
        k_scale: the layer's.
        dtype: to read them in.

    Returns:
        (n, block_size, kv_lora_rank) and (n, block_size, qk_rope_head_dim).
    """
    d, stored = layer.dimensions, layer.cache_format
    check_block_ids(pages, cache.shape[0])
    if stored.codec is None:
        rows = cache.index_select(0, pages).to(dtype)
        kv_c, k_pe = rows.split([d.kv_lora_rank, d.qk_rope_head_dim], dim=-1)
        return kv_c, k_pe
    # As bytes, since not every operation knows every 8-bit dtype.
    rows = cache.view(torch.uint8).index_select(0, pages)[..., None, :]
    parts = stored.decode(rows, d.kv_lora_rank, d.qk_rope_head_dim, k_scale, k_scale)
    return parts[0][..., 0, :].to(dtype), parts[1][..., 0, :].to(dtype)


def merge_into(
    output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add a part's attention to what stands in `output` and `lse`, all float32, in place.

    A part without keys (LSE -inf, zeros) changes nothing, to the bit.
    """
    top = torch.maximum(lse, part_lse)
    top = torch.where(top == -math.inf, 0.0, top)
    share, part_share = torch.exp(lse - top), torch.exp(part_lse - top)
    both = share + part_share
    divisor = torch.where(both == 0, 1.0, both)
    merged = (output * share[..., None] + part * part_share[..., None]) / divisor[..., None]
    nothing_new = part_lse == -math.inf
    output.copy_(torch.where(nothing_new[..., None], output, merged))
    lse.copy_(torch.where(nothing_new, lse, top + torch.log(both)))


def _rows_of(plan: PrefillPart, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tensors if plan.own_rows is None else tuple(x[plan.own_rows] for x in tensors)


def _read_back(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    stored: CacheFormat,
    k_scale: torch.Tensor,
    cache_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents as they will be read from the cache, in their own dtype."""
    if stored.codec is None:
        return kv_c.to(cache_dtype).to(kv_c.dtype), k_pe.to(cache_dtype).to(k_pe.dtype)
    contents = stored.encode(kv_c[:, None], k_pe[:, None], k_scale, k_scale)
    latents = stored.decode(contents, kv_c.shape[-1], k_pe.shape[-1], k_scale, k_scale)
    return latents[0][:, 0].to(kv_c.dtype), latents[1][:, 0].to(k_pe.dtype)
