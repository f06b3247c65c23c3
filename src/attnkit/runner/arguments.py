"""What an LLM is made with, refused before a model is looked for: weights take minutes to load.

In: the arguments of `LLM`. Out: nothing, or the error that would have come later. What depends on the
model is checked where the model is known.
"""

from __future__ import annotations

import torch

from attnkit.arguments import check_count, check_flags
from attnkit.contract import AttentionBackend, DeviceCapability
from attnkit.errors import ConfigurationError, UnsupportedConfiguration
from attnkit.runner.loading import DTYPES
from attnkit.selection import asked_for, find_named


def check_counts(
    *,
    block_size: int | None,
    kv_cache_bytes: int | None,
    num_blocks: int | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    seed: int,
) -> None:
    """Sizes of pages, cache and steps.

    Raises:
        ConfigurationError: one is not allowed, or two do not go together.
    """
    check_count("block_size", block_size, optional=True)
    check_count("kv_cache_bytes", kv_cache_bytes, optional=True)
    check_count("num_blocks", num_blocks, lowest=2, optional=True)
    check_count("max_model_len", max_model_len, optional=True)
    check_count("max_num_seqs", max_num_seqs, optional=True)
    check_count("max_num_batched_tokens", max_num_batched_tokens, optional=True)
    check_count("seed", seed, lowest=-(2**63), highest=2**64 - 1)
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ConfigurationError(
            f"both num_blocks {num_blocks} and kv_cache_bytes {kv_cache_bytes} were given; give one"
        )


def check_modes(
    device: torch.device,
    *,
    enable_prefix_caching: bool,
    kv_connector: bool,
    use_batch_invariant: bool,
    compile: bool,
    cuda_graphs: bool | None,
    debug_poison: bool,
) -> None:
    """What is switched on and off.

    Raises:
        ConfigurationError: no truth value, or what the device or another switch excludes.
    """
    check_flags(
        {
            "enable_prefix_caching": enable_prefix_caching,
            "kv_connector": kv_connector,
            "use_batch_invariant": use_batch_invariant,
            "compile": compile,
            "debug_poison": debug_poison,
        }
    )
    if cuda_graphs is not None:
        check_flags({"cuda_graphs": cuda_graphs})
    if cuda_graphs and device.type != "cuda":
        raise ConfigurationError(
            f"cuda_graphs=True was asked for, and the model would run on {device.type}; leave it out"
        )
    if kv_connector and not enable_prefix_caching:
        raise ConfigurationError(
            "kv_connector finds and leaves prefixes in the prefix cache, which is switched off; "
            "leave enable_prefix_caching on"
        )


def check_backend(
    backend: str | type[AttentionBackend],
    device: torch.device,
    dtype: str | torch.dtype,
    *,
    block_size: int | None = None,
    kv_connector: bool = False,
    use_batch_invariant: bool = False,
) -> None:
    """Refuse a backend that is asked for by name and can serve no layer of any model here.

    Raises:
        BackendError: there is no such backend, it cannot run here, or what is known of the layers
            already is not for it; with every reason.
    """
    named = find_named(backend)
    if named is None:
        return
    capability = DeviceCapability.of(device)
    reasons = [
        reason
        for fits, reason in (
            (named.supports_compute_capability(capability), f"device {capability}"),
            (named.supports_block_size(block_size), f"block size {block_size}"),
            (
                dtype == "auto" or named.supports_dtype(DTYPES.get(dtype, dtype)),  # type: ignore[arg-type]
                f"dtype {dtype}",
            ),
            (not kv_connector or named.supports_kv_connector(), "a KV connector"),
            (not use_batch_invariant or named.supports_batch_invariance(), "batch invariance"),
        )
        if not fits
    ]
    if reasons:
        _, asked = asked_for(backend)
        raise UnsupportedConfiguration(
            f"backend {asked} does not do {', '.join(reasons)}; `attnkit backends` says what it does",
            tuple(reasons),
        )


def check_two_sided(name: str, *, kv_connector: bool, compile: bool) -> None:
    """What an encoder-decoder is run without; `name` is the model's.

    Raises:
        ConfigurationError: it was asked for.
    """
    for asked in (n for n, v in (("kv_connector", kv_connector), ("compile", compile)) if v):
        raise ConfigurationError(
            f"{asked}=True is for decoders, and {name} is an encoder-decoder; leave it out"
        )
