"""Doubles of rivals' libraries: their documented signatures, computed by plain torch on a CPU.

In: what an adapter passes. Out: what the library would return, so that a test sees whether the
arguments mean what the library says they mean. Memory a call may not read is poisoned by the tests.
"""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import torch


def attend(q, keys_of, starts, causal, scale=None, left=-1, soft_cap=0.0):
    """Attention of packed queries; `keys_of(request)` gives k, v of shape (n, kv_heads, d).

    Returns output and natural LSE (tokens, heads); -inf and 0 where a row sees no key. `left`: keys seen
    beside a query's own; -1: all.
    """
    size_v = keys_of(0)[1].shape[-1] if len(starts) > 1 else q.shape[-1]
    out, lse = q.new_empty(*q.shape[:2], size_v), torch.empty(q.shape[:2])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for r in range(len(starts) - 1):
        k, v = (x.float() for x in keys_of(r))
        rows = q[starts[r] : starts[r + 1]].float()
        n, m = len(rows), len(k)
        # Whole blocks of keys that no row sees are not read.
        gone = max(0, m - n - left) if left >= 0 else 0
        k[:gone], v[:gone] = 0, 0
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", rows, k) * scale
        if soft_cap:
            score = soft_cap * torch.tanh(score / soft_cap)
        ahead = torch.arange(m) - torch.arange(m - n, m)[:, None]
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            seen = seen & (ahead >= -left)
        score.masked_fill_(~seen, -math.inf)
        weights = score.softmax(-1).nan_to_num(0.0)
        out[starts[r] : starts[r + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[starts[r] : starts[r + 1]] = score.logsumexp(-1).T
    return out, lse


def varlen(q, keys_of, starts, causal) -> torch.Tensor:
    """Output alone."""
    return attend(q, keys_of, starts, causal)[0]


def ragged(q, k, v, starts, ends, causal, scale):
    """Output and LSE over keys that lie one after the other."""
    return attend(
        q, lambda r: (k[ends[r] : ends[r + 1]], v[ends[r] : ends[r + 1]]), starts, causal, scale
    )


def check_value_size(size: int, size_v: int) -> None:
    """FlashAttention-3's own check."""
    assert (
        size == size_v
        or (128 < size <= 192 and 96 < size_v <= 128)
        or (size <= 64 and size_v <= 512)
    )


def by_head(lse: torch.Tensor) -> torch.Tensor:
    """As FlashAttention returns it: (heads, tokens), plus infinity where a row sees no key."""
    return torch.where(lse == -math.inf, math.inf, lse).T.contiguous()


def from_pages(k_pages, v_pages, table, lens):
    """Reader of pages (blocks, page, heads, d) by block table."""

    def keys_of(r: int):
        n = int(lens[r])
        ids = table[r, : -(-n // k_pages.shape[1])].long()
        return tuple(x[ids].flatten(0, 1)[:n] for x in (k_pages, v_pages))

    return keys_of


def vllm_flash_attention() -> ModuleType:
    """`vllm.vllm_flash_attn.flash_attn_interface` of vLLM 0.20."""
    module = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")

    def get_scheduler_metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype=torch.bfloat16,
        headdim_v=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        cache_leftpad=None,
        page_size=None,
        max_seqlen_k_new=0,
        causal=False,
        window_size=(-1, -1),
        has_softcap=False,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
    ):
        assert batch_size == len(cache_seqlens)
        assert max_seqlen_k == int(cache_seqlens.max())
        return ("plan", num_heads_q, num_heads_kv, headdim, page_size)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        fa_version=2,
        s_aux=None,
    ):
        assert fa_version == 3
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(starts))
        if block_table is None:
            ends = cu_seqlens_k.tolist()
            assert max_seqlen_k == max(b - a for a, b in itertools.pairwise(ends))
            assert seqused_k is None
            check_value_size(q.shape[-1], v.shape[-1])
            answer, lse = ragged(q, k, v, starts, ends, causal, softmax_scale)
            return (answer, by_head(lse)) if return_softmax_lse else answer
        planned = ("plan", q.shape[1], k.shape[2], q.shape[2], k.shape[1])
        assert scheduler_metadata in (None, planned)
        left, right = window_size or (-1, -1)
        assert right == (0 if left >= 0 else -1)
        reader = from_pages(k, v, block_table, seqused_k)
        answer, lse = attend(q, reader, starts, causal, softmax_scale, left, softcap)
        return (answer, by_head(lse)) if return_softmax_lse else answer

    module.get_scheduler_metadata = get_scheduler_metadata
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def dao_flash_attention_3() -> ModuleType:
    """`flash_attn_interface` of the hopper folder of Dao's repository."""
    module = ModuleType("flash_attn_interface")

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        return_attn_probs=False,
    ):
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert max_seqlen_k == max(b - a for a, b in itertools.pairwise(ends))
        check_value_size(q.shape[-1], v.shape[-1])
        answer, lse = ragged(q, k, v, starts, ends, causal, softmax_scale)
        return (answer, by_head(lse)) if return_attn_probs else answer

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=None,
        page_table=None,
        cu_seqlens_q=None,
        max_seqlen_q=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        return_softmax_lse=False,
    ):
        reader = from_pages(k_cache, v_cache, page_table, cache_seqlens)
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts))
        answer, lse = attend(q, reader, starts, causal, softmax_scale, window_size[0], softcap)
        return (answer, by_head(lse), None, None) if return_softmax_lse else answer

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash_attention_2() -> ModuleType:
    """`flash_attn` 2: pages of a multiple of 256 tokens."""
    module = ModuleType("flash_attn")

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        return_attn_probs=False,
        block_table=None,
    ):
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        if block_table is None:
            assert q.shape[-1] == v.shape[-1]
            answer, lse = ragged(q, k, v, starts, ends, causal, softmax_scale)
            return (answer, by_head(lse), None) if return_attn_probs else answer
        assert k.shape[1] % 256 == 0
        lens = [b - a for a, b in itertools.pairwise(ends)]
        reader = from_pages(k, v, block_table, lens)
        answer, lse = attend(q, reader, starts, causal, softmax_scale, window_size[0], softcap)
        return (answer, by_head(lse), None) if return_attn_probs else answer

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


class _FlashInferWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False, backend="auto"
    ):
        assert kv_layout == "NHD"
        assert not bool(float_workspace_buffer.any()), "the workspace starts as zeros"
        self.planned = None

    def keep(
        self,
        indptr,
        indices,
        last_page_len,
        heads,
        kv_heads,
        d,
        page,
        q_type,
        kv_type,
        starts,
        score=(None, -1, None),
    ):
        assert int(indptr[-1]) == len(indices)
        pages = indptr.diff()
        assert bool(((last_page_len >= 1) == (pages >= 1)).all())
        self.score = score
        self.planned = (
            indptr,
            indices,
            last_page_len,
            (heads, kv_heads, d, page),
            q_type,
            kv_type,
            starts,
        )

    def run(self, q, paged_kv_cache, return_lse=False):
        indptr, indices, last, (heads, kv_heads, d, page), q_type, kv_type, starts = self.planned
        if isinstance(paged_kv_cache, tuple):
            k, v = paged_kv_cache
            assert k.stride() == v.stride()
        else:
            k, v = paged_kv_cache.unbind(1)
        assert k.shape[1:] == (page, kv_heads, d)
        assert (q.dtype, k.dtype) == (q_type, kv_type)
        assert q.shape[1:] == (heads, d)

        def keys_of(r: int):
            ids = indices[indptr[r] : indptr[r + 1]].long()
            n = max(0, len(ids) - 1) * page + int(last[r])
            return tuple(x[ids].flatten(0, 1)[:n].to(q_type) for x in (k, v))

        scale, left, soft_cap = self.score
        answer, lse = attend(q, keys_of, starts, True, scale, left, soft_cap or 0.0)
        # Its infinity is 5e4, and rows that see nothing weigh all keys alike.
        blind = lse == -math.inf
        answer[blind], lse[blind] = 7.0, -5e4
        return (answer, lse / math.log(2)) if return_lse else answer


def flashinfer() -> ModuleType:
    """`flashinfer` 0.6: the two batch wrappers."""
    module = ModuleType("flashinfer")

    class BatchDecodeWithPagedKVCacheWrapper(_FlashInferWrapper):
        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode="NONE",
            window_left=-1,
            logits_soft_cap=None,
            q_data_type="float16",
            kv_data_type=None,
            sm_scale=None,
        ):
            self.keep(
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                q_data_type,
                kv_data_type,
                list(range(len(indptr))),
                (sm_scale, window_left, logits_soft_cap),
            )

    class BatchPrefillWithPagedKVCacheWrapper(_FlashInferWrapper):
        def plan(
            self,
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo=None,
            custom_mask=None,
            packed_custom_mask=None,
            causal=False,
            pos_encoding_mode="NONE",
            sm_scale=None,
            window_left=-1,
            logits_soft_cap=None,
            q_data_type="float16",
            kv_data_type=None,
        ):
            assert causal
            self.keep(
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                page_size,
                q_data_type,
                kv_data_type,
                qo_indptr.tolist(),
                (sm_scale, window_left, logits_soft_cap),
            )

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
            assert kv_layout == "NHD"
            assert not bool(float_workspace_buffer.any()), "the workspace starts as zeros"

        def plan(
            self,
            qo_indptr,
            kv_indptr,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo=None,
            custom_mask=None,
            packed_custom_mask=None,
            causal=False,
            pos_encoding_mode="NONE",
            sm_scale=None,
            q_data_type="float16",
            kv_data_type=None,
        ):
            self.starts, self.ends = qo_indptr.tolist(), kv_indptr.tolist()
            assert all(a < b for a, b in itertools.pairwise(self.ends)), "rows without keys"
            self.heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk)
            self.causal, self.scale, self.types = causal, sm_scale, (q_data_type, kv_data_type)

        def run(self, q, k, v, return_lse=False):
            assert (q.shape[1], k.shape[1], k.shape[2], v.shape[2]) == self.heads
            assert (q.dtype, k.dtype) == self.types
            assert q.shape[0] == self.starts[-1]
            assert k.shape[0] == v.shape[0] == self.ends[-1]
            answer, lse = ragged(q, k, v, self.starts, self.ends, self.causal, self.scale)
            return (answer, lse / math.log(2)) if return_lse else answer

    module.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module


def vllm_triton() -> ModuleType:
    """`vllm.v1.attention.ops.triton_unified_attention`."""
    module = ModuleType("vllm.v1.attention.ops.triton_unified_attention")

    def unified_attention(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        block_table,
        softcap,
        q_descale,
        k_descale,
        v_descale,
        seq_threshold_3D=None,
        num_par_softmax_segments=None,
        softmax_segm_output=None,
        softmax_segm_max=None,
        softmax_segm_expsum=None,
    ):
        assert causal
        assert q_descale is None
        assert window_size == (-1, -1)
        assert softmax_scale == q.shape[-1] ** -0.5
        reader = from_pages(k, v, block_table, seqused_k)
        out.copy_(varlen(q, reader, cu_seqlens_q.tolist(), causal))

    module.unified_attention = unified_attention
    return module
