"""`attnkit explain`: which backend, and why not the others.

In: a model, or the shape of a layer; and a device, which need not be here. Out: the decision record
of each kind of layer: chosen, possible or refused, with every reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
import typer

from attnkit.contract import AttentionType, DeviceCapability, MLADimensions
from attnkit.errors import ConfigurationError
from attnkit.selection import AttentionRequest, asked_for, decide, format_decisions

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
        typer.Option(help="cpu, cuda or e.g. sm_90, present or not; left out: this machine's."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    block_size: Annotated[int | None, typer.Option(help="Tokens in a page.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; left out: 32.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; left out: as many.")] = None,
    head_size: Annotated[
        int | None, typer.Option(help="Of queries and keys; left out: 128.")
    ] = None,
    head_size_v: Annotated[int | None, typer.Option(help="Of values; left out: as keys.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Cache format; left out: auto.")
    ] = None,
    attn_type: Annotated[
        str | None,
        typer.Option(help="decoder (left out), encoder, encoder_only or encoder_decoder."),
    ] = None,
    mla: Annotated[
        str | None,
        typer.Option(
            help="A layer over latents: kv_lora_rank,qk_nope_head_dim,qk_rope_head_dim,v_head_dim."
        ),
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="It attends to keys that an indexer chooses (--mla).")
    ] = False,
    window: Annotated[bool, typer.Option("--window", help="Sliding window.")] = False,
    rswa: Annotated[bool, typer.Option("--rswa", help="A window beside a visible prefix.")] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="Logits soft cap.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="Attention sinks.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi.")] = False,
    alibi_sqrt: Annotated[bool, typer.Option("--alibi-sqrt", help="Square-root ALiBi.")] = False,
    non_causal: Annotated[
        bool, typer.Option("--non-causal", help="Batches with causal False.")
    ] = False,
    mm_prefix: Annotated[
        bool, typer.Option("--mm-prefix", help="Ranges that see each other, as images do.")
    ] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Drafts that branch.")] = False,
    head_scales: Annotated[
        bool, typer.Option("--head-scales", help="One K/V scale per head.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits whatever the batch.")
    ] = False,
    kv_connector: Annotated[
        bool, typer.Option("--kv-connector", help="Pages are copied out of and into the cache.")
    ] = False,
    lse: Annotated[bool, typer.Option("--lse", help="Log-sum-exp wanted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which backend a model or a layer gets, and why the others do not serve.

    Options from --heads to --lse describe a layer; --model has its own.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    here = device in (None, "cpu", "cuda")
    capability = _this_machine() if device is None else _capability(device)
    features: dict[str, Any] = {
        "use_sparse": sparse,
        "has_sliding_window": window or rswa,
        "use_rswa": rswa,
        "has_logits_soft_cap": softcap,
        "has_sink": sinks,
        "use_alibi": alibi or alibi_sqrt,
        "use_alibi_sqrt": alibi_sqrt,
        "use_non_causal": non_causal,
        "use_mm_prefix": mm_prefix,
        "use_tree_mask": tree,
        "use_per_head_quant_scales": head_scales,
        "use_batch_invariant": batch_invariant,
        "use_kv_connector": kv_connector,
        "return_lse": lse,
    }
    sizes = (heads, kv_heads, head_size, head_size_v, kv_cache_dtype, attn_type, mla)
    if model is not None:
        if any(features.values()) or any(size is not None for size in sizes):
            raise ConfigurationError(
                "--model has its own layers; leave out what describes one (--heads to --lse), or --model"
            )
        requests = _requests_of_model(None if model == "default" else model, DTYPES[dtype], backend)
    else:
        num_heads = 32 if heads is None else heads
        facts: dict[str, Any] = {
            "num_kv_heads": num_heads if kv_heads is None else kv_heads,
            "head_size": 128 if head_size is None else head_size,
            "head_size_v": head_size_v,
        }
        if mla is not None:
            facts = _latents(mla, (kv_heads, head_size, head_size_v))
        layer = AttentionRequest(
            **facts,
            **features,
            dtype=DTYPES[dtype],
            num_heads=num_heads,
            kv_cache_dtype=kv_cache_dtype or "auto",
            attn_type=attn_type or AttentionType.DECODER.value,
        )
        requests = {"layer": layer}
    _, asked = asked_for(backend)
    served = True
    answers = {}
    for name, request in requests.items():
        request = replace(request, device_capability=capability, block_size=block_size)
        decisions = decide(request, backend, here=here)
        served &= any(d.chosen for d in decisions)
        answers[name] = [asdict(d) for d in decisions]
        if not as_json:
            typer.echo(f"{name} on {capability}: {_describe(request)}")
            typer.echo(format_decisions(asked, decisions))
    if as_json:
        typer.echo(json.dumps(answers, indent=2))
    raise typer.Exit(0 if served else 1)


def _latents(sizes: str, others: tuple[int | None, ...]) -> dict[str, Any]:
    """Fields of the request for a layer over latents."""
    if any(size is not None for size in others):
        raise ConfigurationError(
            "--mla says all sizes; leave out --kv-heads, --head-size and --head-size-v"
        )
    numbers = [int(n) for n in sizes.split(",") if n.strip().isdecimal()]
    if len(numbers) != 4 or sizes.count(",") != 3:
        raise ConfigurationError(
            f"--mla {sizes} is not allowed; give kv_lora_rank,qk_nope_head_dim,qk_rope_head_dim,"
            "v_head_dim, such as 512,128,64,128"
        )
    rank, nope, rope, v = numbers
    d = MLADimensions(kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
    return {"head_size": d.latent_size, "num_kv_heads": 1, "use_mla": True, "mla": d}


def _capability(device: str) -> DeviceCapability:
    return DeviceCapability.of(device) if device == "cuda" else DeviceCapability.parse(device)


def _this_machine() -> DeviceCapability:
    return DeviceCapability.of("cuda" if torch.cuda.is_available() else "cpu")


def _requests_of_model(
    model: str | None, dtype: torch.dtype, backend: str
) -> dict[str, AttentionRequest]:
    """One request per kind of layer, named after the layers that are of it."""
    from attnkit.runner.layers import serves_latents, takes_ranges
    from attnkit.runner.model import load_layer_facts

    kinds: dict[AttentionRequest, list[str]] = {}
    for facts in load_layer_facts(model, dtype):
        is_sparse = facts.indexer is not None
        if facts.latent is not None and (is_sparse or serves_latents(backend)):
            d = facts.latent.dimensions
            request = AttentionRequest(
                head_size=d.latent_size,
                dtype=dtype,
                num_heads=facts.num_heads,
                num_kv_heads=1,
                use_mla=True,
                use_sparse=is_sparse,
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
                use_mm_prefix=takes_ranges(facts, backend),
                attn_type=facts.attn_type.value,
            )
        kinds.setdefault(request, []).append(facts.name)
    return {
        f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]: request
        for request, names in kinds.items()
    }


def _describe(request: AttentionRequest) -> str:
    features: dict[str, Any] = {
        "window": request.has_sliding_window and not request.use_rswa,
        "R-SWA": request.use_rswa,
        "soft cap": request.has_logits_soft_cap,
        "sinks": request.has_sink,
        "sqrt ALiBi": request.use_alibi_sqrt,
        "ALiBi": request.use_alibi and not request.use_alibi_sqrt,
        "non-causal": request.use_non_causal,
        "ranges": request.use_mm_prefix,
        "tree": request.use_tree_mask,
        "sparse": request.use_sparse,
        "scale per head": request.use_per_head_quant_scales,
        "batch invariant": request.use_batch_invariant,
        "KV connector": request.use_kv_connector,
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
