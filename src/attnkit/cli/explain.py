"""`attnkit explain`: which backend, and why not the others.

In: a model, or the shape of a layer; and a device, which need not be here. Out: the decision record
of each kind of layer: chosen, possible or refused, with every reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import torch
import typer

from attnkit.contract import AttentionType, DeviceCapability
from attnkit.errors import ConfigurationError
from attnkit.selection import AttentionRequest, decide, format_decisions

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def explain(
    model: Annotated[
        str | None,
        typer.Option(
            help="A directory, Hugging Face id or GGUF file; 'default' is the built-in one."
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="A backend by name, or auto.")] = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="cpu or e.g. sm_90, present or not; left out: this machine's."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; left out: as many.")] = None,
    head_size: Annotated[int, typer.Option(help="Of queries and keys.")] = 128,
    head_size_v: Annotated[int | None, typer.Option(help="Of values; left out: as keys.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a page.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Cache format.")] = "auto",
    attn_type: Annotated[str, typer.Option(help="decoder, encoder, ...")] = "decoder",
    window: Annotated[bool, typer.Option("--window", help="Sliding window.")] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="Logits soft cap.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="Attention sinks.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi.")] = False,
    alibi_sqrt: Annotated[bool, typer.Option("--alibi-sqrt", help="Square-root ALiBi.")] = False,
    lse: Annotated[bool, typer.Option("--lse", help="Log-sum-exp wanted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which backend a model or a layer gets, and why the others do not serve."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    here = device is None or device == "cpu"
    capability = _this_machine() if device is None else DeviceCapability.parse(device)
    if model is not None:
        requests = _requests_of_model(None if model == "default" else model, DTYPES[dtype], backend)
    else:
        layer = AttentionRequest(
            head_size=head_size,
            head_size_v=head_size_v,
            dtype=DTYPES[dtype],
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=AttentionType(attn_type).value,
            has_sink=sinks,
            has_sliding_window=window,
            use_alibi=alibi or alibi_sqrt,
            use_alibi_sqrt=alibi_sqrt,
            has_logits_soft_cap=softcap,
            return_lse=lse,
        )
        requests = {"layer": layer}
    served = True
    answers = {}
    for name, request in requests.items():
        request = replace(request, device_capability=capability, block_size=block_size)
        decisions = decide(request, backend, here=here)
        served &= any(d.chosen for d in decisions)
        answers[name] = [asdict(d) for d in decisions]
        if not as_json:
            typer.echo(f"{name} on {capability}: {_describe(request)}")
            typer.echo(format_decisions(backend, decisions))
    if as_json:
        typer.echo(json.dumps(answers, indent=2))
    raise typer.Exit(0 if served else 1)


def _this_machine() -> DeviceCapability:
    return DeviceCapability.of("cuda" if torch.cuda.is_available() else "cpu")


def _requests_of_model(
    model: str | None, dtype: torch.dtype, backend: str
) -> dict[str, AttentionRequest]:
    """One request per kind of layer, named after the layers that are of it."""
    from attnkit.runner.model import load_layer_facts, serves_latents

    kinds: dict[AttentionRequest, list[str]] = {}
    for facts in load_layer_facts(model, dtype):
        if facts.latent is not None and serves_latents(backend):
            d = facts.latent.dimensions
            request = AttentionRequest(
                head_size=d.latent_size,
                dtype=dtype,
                num_heads=facts.num_heads,
                num_kv_heads=1,
                use_mla=True,
                mla=d,
            )
        else:
            request = AttentionRequest(
                head_size=facts.head_size,
                head_size_v=facts.head_size_v,
                dtype=dtype,
                num_heads=facts.num_heads,
                num_kv_heads=facts.num_kv_heads,
                has_sink=facts.sinks is not None,
                has_sliding_window=facts.sliding_window is not None,
                has_logits_soft_cap=facts.logits_soft_cap is not None,
                use_alibi=facts.alibi_slopes is not None,
                attn_type=facts.attn_type.value,
            )
        kinds.setdefault(request, []).append(facts.name)
    return {
        f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]: request
        for request, names in kinds.items()
    }


def _describe(request: AttentionRequest) -> str:
    features = {
        "window": request.has_sliding_window,
        "soft cap": request.has_logits_soft_cap,
        "sinks": request.has_sink,
        "sqrt ALiBi": request.use_alibi_sqrt,
        "ALiBi": request.use_alibi and not request.use_alibi_sqrt,
        "LSE": request.return_lse,
    }
    words = [
        _describe_heads(request),
        str(request.dtype).removeprefix("torch."),
        f"{request.attn_type}",
        *(name for name, asked in features.items() if asked),
    ]
    return ", ".join(words)


def _describe_heads(request: AttentionRequest) -> str:
    if request.mla is not None:
        return f"{request.num_heads} query heads, {request.mla}"
    return f"{request.num_heads}/{request.num_kv_heads} heads of {request.head_size}"
