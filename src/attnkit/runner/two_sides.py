"""Calling an encoder-decoder of transformers with packed streams on both sides.

In: token ids and positions of the decoder's tokens, and of the encoder's or what it made of sound, each
one stream. Out: logits. The model's classes take no positions; its two tables of positions are given
them by a hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from attnkit.errors import ModelError

_POSITIONS: ContextVar[dict[nn.Module, torch.Tensor] | None] = ContextVar(
    "attnkit_positions", default=None
)
_HOOKED = "attnkit_positions_hook"


def is_encoder_decoder(model: Any) -> bool:
    """Whether the model's decoder reads an encoder's output."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def decoder_start(model: Any) -> list[int] | None:
    """The tokens that an answer begins with; None: the model has no encoder whose text it answers."""
    if not is_encoder_decoder(model):
        return None
    said = model.generation_config
    start = [said.decoder_start_token_id, said.forced_bos_token_id]
    if start[0] is None:
        start[0] = getattr(model.config, "decoder_start_token_id", None)
    return [token for token in start if token is not None]


def take_positions(model: Any) -> None:
    """Let both sides' tables of positions take theirs from `call`. Repeating it does nothing more.

    Raises:
        ModelError: a side has no table of positions.
    """
    for table in _tables(model):
        if _HOOKED not in table.__dict__:
            handle = table.register_forward_pre_hook(_give_positions, with_kwargs=True)
            object.__setattr__(table, _HOOKED, handle)


def call(
    model: Any,
    encoder_ids: torch.Tensor | None,
    encoder_positions: torch.Tensor | None,
    ids: torch.Tensor,
    positions: torch.Tensor,
    encoder_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of the decoder's tokens, [num_tokens, vocab_size].

    Args:
        encoder_ids: int64 (num_encoder_tokens,); None without `encoder_output`: no request begins in
            this step, and the cross attention layers get one row of zeros, of which nothing is kept.
        encoder_positions: likewise.
        ids: int64 (num_tokens,).
        positions: likewise.
        encoder_output: (1, num_encoder_tokens, hidden_size), where the encoder has run.
    """
    encoder_table, table = _tables(model)
    options: dict[str, Any] = {}
    given = {table: positions}
    if encoder_output is not None:
        options["encoder_outputs"] = (encoder_output,)
    elif encoder_ids is None or encoder_positions is None:
        weight: Any = encoder_table.weight
        options["encoder_outputs"] = (weight.new_zeros(1, 1, weight.shape[1]),)
    else:
        options["input_ids"] = encoder_ids[None]
        given[encoder_table] = encoder_positions
    with _at(given):
        return model(decoder_input_ids=ids[None], use_cache=False, **options).logits[0]


@contextmanager
def _at(positions: dict[nn.Module, torch.Tensor]) -> Iterator[None]:
    token = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


def _give_positions(table: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    given = _POSITIONS.get() or {}
    return (args, {**kwargs, "position_ids": given[table]} if table in given else kwargs)


def _tables(model: Any) -> tuple[nn.Module, nn.Module]:
    encoder_table, table = (
        getattr(side, "embed_positions", None)
        for side in (model.get_encoder(), model.get_decoder())
    )
    if encoder_table is None or table is None:
        raise ModelError(
            f"{type(model).__name__} has no table of positions, which attnkit's runner needs of an "
            "encoder-decoder; use BART, mBART, Pegasus, Marian, Whisper or the like"
        )
    return encoder_table, table
