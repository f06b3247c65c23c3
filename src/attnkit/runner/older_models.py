"""Models older than transformers' attention interface, made to call it: BLOOM, Falcon and MPT.

In: a model in eval mode whose attention modules compute scores in their own `forward`. Out: the same
modules with a forward that projects as they do and leaves attention to a function in the interface's
signature. ALiBi goes with the call as `alibi_slopes`, read from the bias that the model made.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from attnkit.errors import ModelError

AttentionFunction: TypeAlias = Callable[..., tuple[torch.Tensor, None]]


def call_function(model: nn.Module, function: AttentionFunction) -> bool:
    """Let the model's attention modules call `function`, until `call_own`.

    Returns:
        False, and nothing is changed, where the model has no module of these kinds.
    """
    modules = [m for m in model.modules() if type(m).__name__ in _FORWARDS]
    for module in modules:
        # A method, so that a copy of the model has its own.
        forward = functools.partial(_FORWARDS[type(module).__name__], function)
        object.__setattr__(module, "forward", types.MethodType(forward, module))
    return bool(modules)


def call_own(model: nn.Module) -> None:
    """Undo `call_function`; nothing happens where it was not called."""
    for module in model.modules():
        if type(module).__name__ in _FORWARDS:
            module.__dict__.pop("forward", None)


def _bloom(
    attend: AttentionFunction,
    module: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`BloomAttention.forward`; alibi is [num_heads, 1, T], slope times key position."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    output, _weights = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.inv_norm_factor,
        alibi_slopes=alibi[:, 0, :2][
            :, -1
        ],  # at key 1; a step of one token has none, and no reader
    )
    return module.dense(output.flatten(2)) + residual, None


def _falcon(
    attend: AttentionFunction,
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`FalconAttention.forward` with rotary positions."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    heads = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (x.transpose(1, 2) for x in heads)
    if module.new_decoder_architecture:  # It has repeated each KV head for its query heads.
        group = module.num_heads // module.num_kv_heads
        key, value = key[:, ::group], value[:, ::group]
    if alibi is not None:
        raise ModelError(
            f"{type(module).__name__} has ALiBi, which transformers' eager attention adds twice and its "
            "sdpa once, so attnkit cannot tell which is meant; use a Falcon with rotary positions"
        )
    if position_embeddings is not None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    output, _weights = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.inv_norm_factor,
    )
    return module.dense(output.flatten(2)), None


_NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Stands for the mask that a step does not have."""


def _mpt_model(_: AttentionFunction, module: Any, *args: Any, **kwargs: Any) -> Any:
    """`MptModel.forward`, which needs some mask where the attention function has none."""
    from transformers import AttentionMaskInterface

    if module.config._attn_implementation not in AttentionMaskInterface():
        kwargs["attention_mask"] = _NO_MASK  # One of four dimensions is taken as it is.
    return type(module).forward(module, *args, **kwargs)


def _mpt(
    attend: AttentionFunction,
    module: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`MptAttention.forward`; position_bias is [num_heads, 1, max_seq_len], minus a slope at the last
    key but one."""
    heads = module.Wqkv(hidden_states)
    if module.clip_qkv:
        heads = heads.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = heads.unflatten(2, (3, module.n_heads, -1)).permute(2, 0, 3, 1, 4)
    output, _weights = attend(
        module,
        query,
        key,
        value,
        None if attention_mask is _NO_MASK else attention_mask,
        scaling=module.softmax_scale,
        alibi_slopes=-position_bias[:, 0, -2],
    )
    return module.out_proj(output.flatten(2)), None


_FORWARDS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "MptModel": _mpt_model,
}
