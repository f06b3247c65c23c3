"""attn_implementation="attnkit" by name alone: each call brings all of its keys, and we page them.

In: one attention call of a model nobody has given to `enable`, with the keys and values that whichever
cache of transformers holds. Out: its output, through our backend. What a layer is follows from its first
call. From the second call of the model on, a `DynamicCache` without windows is `taken` over into our
pages; of all other caches the keys are copied into pages in every call, which `enable` spares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from attnkit.contract import CommonAttentionMetadata, ModelConfig, VllmConfig
from attnkit.errors import ModelError
from attnkit.integrations.hf.taken import Rows, RowsMask, TakenModel
from attnkit.layer import Attention
from attnkit.runner import hook
from attnkit.runner.discovery import AttentionCall, layer_facts
from attnkit.runner.model import max_model_len_of
from attnkit.runner.planner import plan_key
from attnkit.runner.shared_pages import common_layout
from attnkit.runner.step import StepRows
from attnkit.upload import Upload

NAME = "attnkit"
_WHOLE = "attnkit_whole_layer"


def register() -> None:
    """Make the name known to transformers. Registering again changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)


def describe_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> RowsMask:
    """transformers' mask function for `NAME`: reads the mask instead of making one.

    Raises:
        ModelError: the mask is not causal or windowed with padding in front, or the cache is longer
            than its tokens.
    """
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise ModelError(
            f"the cache has room for {kv_length} keys where {int(q_offset) + q_length} tokens are "
            "known, as static caches have; use a dynamic one"
        )
    width: int | None = kv_length
    if mask_function is not causal_mask_function:
        keys = torch.arange(kv_offset, kv_offset + kv_length)
        width = _width(mask_function, batch_size, keys[-q_length:], keys)
    if use_vmap or width is None:
        raise ModelError(
            "the model asks for a mask that is neither causal nor a causal sliding window (packed "
            "sequences, image spans or the like), which attnkit does not support under this name; use "
            "another attn_implementation"
        )
    padding = np.zeros(batch_size, dtype=np.int64)
    has_padding = attention_mask is not None and not bool(attention_mask[:, -kv_length:].all())
    if has_padding:
        assert attention_mask is not None
        visible = attention_mask[:, -kv_length:].to("cpu", torch.bool).numpy()
        padding = np.where(visible.any(axis=1), visible.argmax(axis=1), kv_length)
        # Padding at the end is not seen by what comes before, and belongs to this step alone.
        tail = visible[:, ::-1].argmax(axis=1)
        bad = visible.sum(axis=1) + tail + padding != kv_length
        bad = visible.any(axis=1) & (bad | (tail >= q_length))
        for row in np.flatnonzero(bad):
            raise ModelError(
                f"the attention_mask has a hole in row {row}; attnkit takes padding in front of a row "
                "alone"
            )
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).as_subclass(RowsMask)
    mask.mask_function = mask_function
    mask.rows = Rows(kv_length, q_length, padding, has_padding, width)
    return mask


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one call, in transformers' signature.

    Args:
        module: the model's attention module.
        query: [B, num_heads, T, head_size].
        key: [B, num_kv_heads, N, head_size], this step's last; value likewise.
        attention_mask: from `describe_mask`.
        options: transformers' per-layer facts.

    Raises:
        ModelError: training, a mask of another kind, or an argument attnkit does not know.
    """
    where = type(module).__name__
    if module.training or query.requires_grad:
        raise ModelError(
            f"{where} was called to be trained (training mode, or gradients are recorded), and attnkit "
            "runs inference alone; call model.eval() and use torch.no_grad(), or another "
            "attn_implementation"
        )
    if options.get("output_attentions"):
        raise ModelError(
            f"{where} was asked for output_attentions, which attnkit never has in memory; leave it out, "
            "or use attn_implementation='eager'"
        )
    rows = getattr(attention_mask, "rows", None)
    if rows is None:
        raise ModelError(
            f"{where} does not get its mask from transformers' mask functions, so attnkit does not know "
            "what it may see; leave attention masks of your own out, or use another attn_implementation"
        )
    layer = getattr(module, _WHOLE, None)
    if rows.step is not None and layer is not None:
        plans, caches = rows.step
        name = layer.layer_name
        return hook.call_layer(layer, query, key, value, caches[name], plans[name]), None
    if layer is None:
        call = AttentionCall(module, query, key, value, attention_mask, options)
        layer = _make_layer(call)
        object.__setattr__(module, _WHOLE, layer)
        if rows.model is None:
            rows.model = TakenModel(module)
        rows.model.by_index[getattr(module, "layer_idx", -1)] = layer
    if rows.num_keys > layer.vllm_config.model_config.max_model_len:
        raise ModelError(
            f"{where} was given {rows.num_keys} tokens, but takes "
            f"{layer.vllm_config.model_config.max_model_len}; shorten them"
        )
    if rows.width != min(layer.sliding_window or rows.num_keys, rows.num_keys):
        raise ModelError(
            f"{where} has a sliding window of {layer.sliding_window} but a mask of {rows.width} keys, "
            "and attnkit cannot tell which is meant; use another attn_implementation"
        )
    pages = _pages(layer, key, value, rows)
    kind = (*plan_key(layer), layer.block_size)
    if kind not in rows.plans:
        rows.plans[kind] = layer.build(_batch(layer, rows))
    new = (x[:, :, -rows.num_new :] for x in (query, key, value))
    return hook.call_layer(layer, *new, pages, rows.plans[kind]), None


def _width(
    mask_function: Callable[..., torch.Tensor],
    num_rows: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> int | None:
    """How many keys the last query sees, if every query sees the like; None otherwise.

    Asked along the mask's edges only: what is just seen and just not seen, by each query.
    """
    row, head = torch.arange(num_rows)[:, None], torch.zeros((), dtype=torch.long)

    def seen(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_function(row, head, query, key).expand(num_rows, -1)

    try:
        last = seen(queries[-1:], keys)
        width = int(last[0].sum())
        ends_right = (
            bool((last[:, len(keys) - width :]).all()) and int(last.sum()) == num_rows * width
        )
        begins = queries - width + 1
        inside = begins >= keys[0]
        below = begins > keys[0]
        good = (
            width > 0
            and ends_right
            and bool(seen(queries, queries).all())
            and not bool(seen(queries[:-1], queries[1:]).any())
            and bool(seen(queries[inside], begins[inside]).all())
            and not bool(seen(queries[below], begins[below] - 1).any())
            and bool(seen(queries[~inside], keys[:1]).all())
        )
    except (IndexError, RuntimeError):  # It depends on more than positions.
        return None
    return width if good else None


def _make_layer(call: AttentionCall) -> Attention:
    """The layer a call is of."""
    kind = type(call.module).__name__
    longest = max_model_len_of(call.module.config, None)
    fact = layer_facts(kind, f"layer {getattr(call.module, 'layer_idx', '?')}", call, longest, {})
    if fact.attention_chunk_size is not None:
        raise ModelError(
            f"{fact.name} of {kind} sees chunks of {fact.attention_chunk_size} tokens, which attnkit "
            "does not do under this name; use attnkit.hf.enable, or another attn_implementation"
        )
    settings: dict[str, Any] = {
        "num_kv_heads": fact.num_kv_heads,
        "sliding_window": fact.sliding_window,
        "logits_soft_cap": fact.logits_soft_cap,
        "sinks": fact.sinks,
        "alibi_slopes": fact.alibi_slopes,
        "head_size_v": fact.head_size_v,
        "dtype": fact.dtype,
        "device": call.query.device,
        "vllm_config": VllmConfig(
            model_config=ModelConfig(dtype=fact.dtype, max_model_len=longest)
        ),
    }
    default = 16 if call.query.device.type == "cuda" else 64

    def make(block_size: int, backend: Any) -> Attention:
        return Attention(
            fact.num_heads,
            fact.head_size,
            fact.scale,
            block_size=block_size,
            backend=backend,
            **settings,
        )

    layer = make(default, "auto")
    preferred = layer.backend.get_preferred_block_size(default)
    return layer if preferred == default else make(preferred, layer.backend)


def _batch(layer: Attention, rows: Rows) -> CommonAttentionMetadata:
    """The step's rows, whose keys are in their pages already."""
    num_rows, width = len(rows.padding), -(-rows.num_keys // layer.block_size)
    seq_lens = rows.num_keys - rows.padding
    tables = 1 + np.arange(num_rows * width).reshape(num_rows, width)
    upload = Upload(layer.device)
    described = StepRows(
        upload,
        np.full(num_rows, rows.num_new),
        seq_lens,
        [tables.tolist()],
        [layer.block_size],
        1,
        writes=False,
    )
    host, moved = upload.send()
    starts = torch.from_numpy(seq_lens == rows.num_new)
    (batch,) = described.batches(host, moved, starts)
    return batch


def _pages(layer: Attention, key: torch.Tensor, value: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Keys and values of every row in pages of its own, one row after the other from block 1 on."""
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    num_rows, num_heads, num_keys, head_size = key.shape
    page, width = layer.block_size, -(-num_keys // layer.block_size)
    shape = (1 + num_rows * width, num_heads, page, spec.content_size)
    order = [dim - 1 for dim in common_layout({layer.backend}).value[1:]]
    memory = torch.empty([shape[d] for d in order], dtype=spec.dtype, device=key.device)
    pages = memory.permute([order.index(dim) for dim in range(4)])
    for row, padding in enumerate(rows.padding.tolist()):
        own = pages[1 + row * width : 1 + (row + 1) * width]
        num_full, rest = divmod(num_keys - padding, page)
        for x, content in (key, own[..., :head_size]), (value, own[..., head_size:]):
            tokens = x[row, :, padding:]
            whole = tokens[:, : num_full * page].unflatten(1, (num_full, page))
            content[:num_full].copy_(whole.transpose(0, 1))
            if rest:
                content[num_full, :, :rest].copy_(tokens[:, num_full * page :])
    return pages
