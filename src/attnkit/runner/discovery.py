"""What a transformers model's attention layers are, found by running a few tokens through it.

In: a causal language model and the longest sequence it takes. Out: `LayerFacts` per attention
module, in the order of the forward pass, and the proof that the model can be driven as one packed
stream: outside of attention no token may feel another, and `position_ids` must be honoured.
A model that fails is refused with its class, the layer and the reason.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from attnkit.contract import AttentionType
from attnkit.errors import ModelError
from attnkit.runner import hook, two_sides
from attnkit.runner.indexers import IndexerFacts, indexer_facts, recording_choices
from attnkit.runner.latents import Expansion, LatentFacts, latent_facts, recording_expansions
from attnkit.runner.reach import Mask, Reach, reach_of_causal_mask, reach_of_open_mask
from attnkit.runner.sound import encode, reads_sound, silence
from attnkit.runner.temperature import QueryTemperature, left_to_us
from attnkit.runner.token_types import TokenTypes, read_token_types

# Keyword arguments of an attention call that cannot change its result here: facts read by name,
# bookkeeping of transformers, and offsets that only its own varlen kernels read.
_HARMLESS = frozenset(
    {
        "scaling", "sliding_window", "softcap", "s_aux", "alibi_slopes", "position_ids",
        "position_embeddings", "use_cache", "output_attentions", "output_hidden_states",
        "output_router_logits", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
        "max_length_k", "deterministic", "cache_position", "layer_idx", "target_dtype", "implementation",
    }
)  # fmt: skip
_NUM_PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFacts:
    """One attention layer, in the words of `attnkit.Attention`'s constructor.

    Attributes:
        name: the module's path in the model, unique.
        module: the attention module.
        scale: factor on q.k.
        sliding_window: keys a query sees, itself included; None: all.
        attention_chunk_size: it sees those of its own chunk of positions alone; None: no chunks.
        logits_soft_cap: None: no cap.
        sinks: (num_heads,) or None.
        alibi_slopes: one per query head; None: no ALiBi.
        dtype: of queries, which need not be that of the weights (they may be quantised).
        latent: its keys and values are expanded latents, which it may keep instead; None: no.
        indexer: chooses the keys it attends to, which is then a layer over latents; None: it attends to
            all that it sees.
        temperature: what queries are scaled with by their position, which the layer must do in the
            module's place; None: nothing.
        attn_type: what it attends to.
        token_types: which tokens of a prompt see each other in both directions; None: none do.
    """

    name: str
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    sliding_window: int | None
    attention_chunk_size: int | None
    logits_soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: tuple[float, ...] | None
    dtype: torch.dtype
    latent: LatentFacts | None = None
    indexer: IndexerFacts | None = None
    temperature: QueryTemperature | None = None
    attn_type: AttentionType = AttentionType.DECODER
    token_types: TokenTypes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of the attention function, in transformers' words.

    Attributes:
        mask: made by a mask function that keeps `mask_function` on it.
        options: keyword arguments.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]


class _CallRecorder:
    """Collects the calls of one forward pass; attention itself is zero."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        self.calls.append(AttentionCall(module, query, key, value, attention_mask, options))
        _, num_heads, num_tokens, _ = query.shape
        return query.new_zeros(1, num_tokens, num_heads, value.shape[-1])


def discover_layers(
    model: nn.Module, max_model_len: int, *, encoder: bool = False
) -> tuple[LayerFacts, ...]:
    """Probe `model`, whose attention implementation is `hook.PROBE`.

    Two passes of six tokens. In the second the tokens and positions are shuffled together and one
    token is another: every row that belongs to an unchanged token must come out as before, or
    something outside of attention mixes tokens (a convolution, a recurrent state) or ignores
    `position_ids`; in a packed stream that would leak one request into another.

    Args:
        model: a transformers causal language model in eval mode, or an encoder.
        max_model_len: masks are read up to this position.
        encoder: its layers must see both directions; else none may.

    Raises:
        ModelError: the model cannot be driven.
    """
    kind = type(model).__name__
    if not encoder and two_sides.is_encoder_decoder(model):
        two_sides.take_positions(model)
    device = next(model.parameters()).device
    vocab_size = _embedding_rows(model)
    ids = torch.arange(_NUM_PROBE_TOKENS, device=device) * 7 % vocab_size
    positions = torch.arange(_NUM_PROBE_TOKENS, device=device)
    order = torch.tensor([3, 0, 5, 2, 4, 1], device=device)
    changed = 2  # a row of the shuffled batch
    shuffled = ids[order]
    shuffled[changed] = (shuffled[changed] + 1) % vocab_size
    with left_to_us(model) as temperatures:
        with recording_expansions(model) as expansions, recording_choices(model) as choices:
            first, first_output = _probe(model, ids, positions)
        second, second_output = _probe(model, shuffled, positions[order])
    if not first:
        raise ModelError(
            f"{kind} does not call transformers' attention interface, so attnkit cannot take its "
            "attention over; use a model whose class supports attn_implementation by name"
        )
    kept = torch.tensor([r for r in range(_NUM_PROBE_TOKENS) if r != changed], device=device)
    _check_tokens_are_independent(kind, first, second, order, kept)
    _check_rows(kind, "the output", first_output[order], second_output, kept)

    if not encoder and two_sides.is_encoder_decoder(model) and reads_sound(model.config):
        first = [*_calls_of_sound(model), *first]
    token_types = None if encoder else _token_types(model, ids, positions)
    names = {module: name for name, module in model.named_modules()}
    facts = []
    seen: set[nn.Module] = set()
    reaches: dict[int, Reach] = {}  # by mask: layers share a few
    for call in first:
        name = names[call.module]
        if call.module in seen:
            raise ModelError(
                f"{kind}: {name} calls the attention function more than once per pass, which attnkit "
                "does not support; use another model"
            )
        seen.add(call.module)
        attn_type = AttentionType.ENCODER_ONLY if encoder else _attn_type(model, call.module)
        is_open = attn_type is not AttentionType.DECODER
        indexer = None if is_open else indexer_facts(call.module, choices.get(call.module))
        fact = layer_facts(
            kind,
            name,
            call,
            max_model_len,
            reaches,
            encoder=is_open,
            indexer=indexer,
            is_prefix_lm=token_types is not None,
        )
        if not is_open and call.key.shape[2] != call.query.shape[2]:
            raise ModelError(
                f"{kind}: layer {name} attends to {call.key.shape[2]} keys for {call.query.shape[2]} "
                "tokens without a cache; attnkit keeps one key a token: use another model"
            )
        latent = None if is_open else _latent(fact, call, expansions)
        if indexer is not None and latent is None:
            raise ModelError(
                f"{kind}: layer {name} attends to chosen keys, and not over latents that its kv_b_proj "
                "expands, which attnkit's sparse layers do; use another model"
            )
        facts.append(
            replace(
                fact,
                latent=latent,
                temperature=temperatures.get(call.module),
                attn_type=attn_type,
                token_types=token_types,
            )
        )
    return tuple(facts)


def _token_types(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> TokenTypes | None:
    """What the masks of a decoder show of them."""
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        return None

    def masks_of(types: torch.Tensor | None) -> list[Any]:
        options = {} if types is None else {"token_type_ids": types[None]}
        calls, _ = _probe(model, ids, positions, **options)
        return [getattr(call.mask, "mask_function", None) for call in calls]

    return read_token_types(_NUM_PROBE_TOKENS, ids.device, masks_of)


def _attn_type(model: Any, module: nn.Module) -> AttentionType:
    """Of a layer of a decoder, or of an encoder-decoder."""
    if not two_sides.is_encoder_decoder(model):
        return AttentionType.DECODER
    if any(module is other for other in model.get_encoder().modules()):
        return AttentionType.ENCODER
    is_causal = getattr(module, "is_causal", True)
    return AttentionType.DECODER if is_causal else AttentionType.ENCODER_DECODER


def _latent(
    fact: LayerFacts, call: AttentionCall, expansions: dict[nn.Module, Expansion]
) -> LatentFacts | None:
    """Layers over latents have no window, chunks, cap, sinks or ALiBi."""
    if fact.sliding_window or fact.attention_chunk_size or fact.logits_soft_cap:
        return None
    if fact.sinks is not None or fact.alibi_slopes is not None:
        return None
    return latent_facts(call.module, expansions.get(call.module), call.key, call.value)


def _embedding_rows(model: nn.Module) -> int:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def _probe(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, **options: torch.Tensor
) -> tuple[list[AttentionCall], torch.Tensor]:
    recorder = _CallRecorder()
    with torch.inference_mode(), hook.recording(recorder):
        if two_sides.is_encoder_decoder(model):
            if reads_sound(model.config):  # Its encoder mixes frames, within one recording.
                output = model.get_input_embeddings()(ids)[None]  # type: ignore[operator]
                return recorder.calls, two_sides.call(model, None, None, ids, positions, output)
            return recorder.calls, two_sides.call(model, ids, positions, ids, positions)
        output = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, **options
        )
    return recorder.calls, output[0][0]  # logits, or an encoder's hidden states


def _calls_of_sound(model: Any) -> list[AttentionCall]:
    """Those of an encoder that reads sound."""
    recorder = _CallRecorder()
    with torch.inference_mode(), hook.recording(recorder):
        encode(model, silence(model))
    return recorder.calls


def _check_tokens_are_independent(
    kind: str,
    first: list[AttentionCall],
    second: list[AttentionCall],
    order: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    if [c.module for c in first] != [c.module for c in second]:
        raise ModelError(
            f"{kind} runs different attention layers for different tokens, which attnkit does not "
            "support; use another model"
        )
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        for what in ("query", "key", "value"):
            rows = getattr(a, what)[0].transpose(0, 1)
            _check_rows(
                kind,
                f"the {what} of attention layer {index}",
                rows[order],
                getattr(b, what)[0].transpose(0, 1),
                kept,
            )


def _check_rows(
    kind: str, what: str, expected: torch.Tensor, given: torch.Tensor, kept: torch.Tensor
) -> None:
    # Reordered rows may be summed in another order (expert layers regroup tokens): allow a few
    # roundings of the dtype, 0.01 % in float32 and 3 % in bfloat16.
    limit = max(1e-4, 4 * torch.finfo(expected.dtype).eps) * expected.abs().max().item()
    expected, given = expected[kept].float(), given[kept].float()
    if not bool(((expected - given).abs() <= limit).all()):
        raise ModelError(
            f"{kind}: {what} of a token changes with the other tokens or ignores position_ids, so "
            "requests packed into one stream would leak into each other (a recurrent, convolutional "
            "or otherwise token-mixing layer); attnkit cannot drive it: use a model that mixes tokens "
            "in attention alone"
        )


def layer_facts(
    kind: str,
    name: str,
    call: AttentionCall,
    max_model_len: int,
    reaches: dict[int, Reach],
    *,
    encoder: bool = False,
    indexer: IndexerFacts | None = None,
    is_prefix_lm: bool = False,
) -> LayerFacts:
    """What a call says of its layer.

    Args:
        kind: the model's class, and
        name: the module's path in it, for errors.
        call: the layer's first.
        max_model_len: masks are read up to this position.
        reaches: by the id of a mask, what has been read of it; grows.
        encoder: it must see both directions.
        indexer: that chooses its keys, if it has one that is known.
        is_prefix_lm: it may call itself bidirectional; what it sees without token types its mask says.

    Raises:
        ModelError: attnkit does not know what the layer asks for.
    """
    options = call.options
    where = f"{kind}: layer {name}"
    if options.get("dropout"):
        raise ModelError(f"{where} uses dropout {options['dropout']}; put the model in eval mode")
    is_causal = options.get("is_causal")
    is_causal = getattr(call.module, "is_causal", True) if is_causal is None else is_causal
    if encoder and is_causal is not False:
        raise ModelError(f"{where} is causal; use attnkit.LLM for decoders")
    if not encoder and is_causal is False and not is_prefix_lm:
        raise ModelError(
            f"{where} is bidirectional (is_causal False); attnkit.LLM drives causal decoders: use "
            "attnkit.Embedder for encoders"
        )
    if indexer is None and getattr(call.module, "indexer", None) is not None:
        raise ModelError(
            f"{where} attends to keys that an indexer picks for each query (sparse attention), in a way "
            "that attnkit does not know (it knows DeepSeek-V3.2's); use a model with dense attention"
        )
    if not encoder:
        _check_keys(where, call)
    harmless = _HARMLESS if indexer is None else _HARMLESS | {"indices"}
    unknown = sorted(
        key
        for key, value in options.items()
        if value is not None and key not in harmless and key not in ("dropout", "is_causal")
    )
    if unknown:
        raise ModelError(
            f"{where} passes {', '.join(unknown)} to its attention function, whose effect attnkit does "
            "not know; use another model"
        )
    reach = _reach(where, call, max_model_len, reaches, encoder)
    scale = options.get("scaling")
    num_heads, head_size = call.query.shape[1], call.query.shape[3]
    sinks, slopes = options.get("s_aux"), options.get("alibi_slopes")
    return LayerFacts(
        name=name,
        module=call.module,
        num_heads=num_heads,
        num_kv_heads=call.key.shape[1],
        head_size=head_size,
        head_size_v=call.value.shape[3],
        scale=float(scale) if scale is not None else head_size**-0.5,
        sliding_window=reach.window,
        attention_chunk_size=reach.chunk_size,
        logits_soft_cap=options.get("softcap") or None,
        sinks=None if sinks is None else sinks.detach(),
        alibi_slopes=None if slopes is None else tuple(slopes.tolist()),
        dtype=call.query.dtype,
        indexer=indexer,
    )


def _check_keys(where: str, call: AttentionCall) -> None:
    """Refuse keys that stand for several tokens: a probe is too short to show most of them.

    Raises:
        ModelError: a compressor makes some.
    """
    compressor = getattr(call.module, "compressor", None)
    if compressor is not None:
        every = getattr(compressor, "compress_rate", "several")
        chosen = ", of which an indexer chooses some," if hasattr(compressor, "indexer") else ""
        raise ModelError(
            f"{where} attends, beside its window, to states of {every} tokens each{chosen} that its "
            "compressor pools (DeepSeek-V4). The runner has no place for the projections of a state's "
            "tokens until it is whole, nor for two caches under one softmax with sinks; it runs layers "
            "of that model that have a window alone. As layers of your own: "
            "MLAAttention(tokens_per_state=...), merged with a window's by their lse"
        )


def _reach(
    where: str,
    call: AttentionCall,
    max_model_len: int,
    reaches: dict[int, Reach],
    encoder: bool,
) -> Reach:
    """What the model's own mask function describes: a causal mask, a window or chunks of it, or in an
    encoder both directions alike.

    The mask is what transformers' eager attention obeys. `sliding_window` in the call is what its
    flash kernels obey. Where they differ transformers contradicts itself, and the layer is refused.
    """
    if encoder and call.mask is None:
        return Reach()
    mask_function = getattr(call.mask, "mask_function", None)  # lost where the model edits the mask
    if mask_function is None:
        raise ModelError(
            f"{where} does not get its mask from transformers' mask functions, so attnkit does not know "
            "what it may see; use another model"
        )
    key = id(call.mask)
    if key not in reaches:
        mask = Mask(where, mask_function, max_model_len, call.query.device)
        reaches[key] = reach_of_open_mask(mask) if encoder else reach_of_causal_mask(mask)
    reach = reaches[key]
    said = call.options.get("sliding_window")
    said = None if said is None or said >= max_model_len else int(said)
    if said != reach.window:
        raise ModelError(
            f"{where} asks for sliding_window={said} but its mask shows {reach.window}; attnkit cannot "
            "tell which is meant: use another model"
        )
    return reach
