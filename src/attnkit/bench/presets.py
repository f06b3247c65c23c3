"""Presets: the frozen sets of workloads that records are made of.

In: a preset's name. Out: its groups of workloads, each group a table of its own. They are not to be
edited to suit a kernel: a shape that is added stays, so that records stay comparable.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnkit.bench.workloads import (
    LayerShape,
    Workload,
    build,
    decode,
    mixed,
    prefill,
    verify,
    write,
)
from attnkit.errors import ConfigurationError

Groups = Mapping[str, tuple[Workload, ...]]


def _gqa(block_size: int, kv_cache_dtype: str = "auto") -> LayerShape:
    """The layer of an 8B model: 32 query heads over 8 KV heads of size 128."""
    return LayerShape(block_size=block_size, kv_cache_dtype=kv_cache_dtype)


def _prefills(block_size: int) -> tuple[Workload, ...]:
    def layer(heads: int, kv_heads: int, head_size: int) -> LayerShape:
        return LayerShape(
            num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size
        )

    return (
        prefill(16, 1024, layer(16, 16, 128)),
        prefill(4, 4096, layer(16, 16, 128)),
        prefill(1, 16384, layer(16, 16, 128)),
        prefill(1, 16384, layer(32, 32, 64)),
        prefill(1, 16384, layer(8, 8, 256)),
        prefill(4, 4096, layer(32, 8, 128)),
    )


H200: Groups = {
    "prefill": _prefills(16),
    "prefill-page128": _prefills(128),
    "decode": (
        decode(1, 32768, _gqa(16)),
        decode(8, 8192, _gqa(16)),
        decode(64, 4096, _gqa(16)),
        decode(256, 1024, _gqa(16)),
        decode(128, 8192, LayerShape(num_heads=64)),
        decode(64, 4096, LayerShape(num_kv_heads=32)),
        decode(64, 4096, LayerShape(head_size=64)),
        decode(1, 1024, _gqa(16)),
    ),
    "decode-fp8": (
        decode(1, 32768, _gqa(16, "fp8")),
        decode(8, 8192, _gqa(16, "fp8")),
        decode(64, 4096, _gqa(16, "fp8")),
        decode(256, 1024, _gqa(16, "fp8")),
        decode(128, 8192, LayerShape(num_heads=64, kv_cache_dtype="fp8")),
        decode(64, 4096, LayerShape(num_kv_heads=32, kv_cache_dtype="fp8")),
        decode(64, 4096, LayerShape(head_size=64, kv_cache_dtype="fp8")),
    ),
    "decode-int8": (decode(64, 4096, _gqa(16, "int8_per_token_head")),),
    "batch-sweep": tuple(
        decode(batch, 4096, _gqa(16))
        for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    ),
    "ctx-sweep": tuple(
        decode(8, context, _gqa(16))
        for context in (256, 512, 1000, 1024, 2000, 2048, 4096, 8192, 16384, 32768)
    ),
    "chunk": tuple(
        prefill(1, new, _gqa(16), context=32_768 - new)
        for new in (16, 17, 32, 64, 128, 256, 512, 1024)
    ),
    "verify": tuple(verify(64, query, 4096, _gqa(16)) for query in (1, 2, 4, 8)),
    "mixed": (mixed(2048, 8192, 63, 4096, _gqa(16)),),
    "write": (
        write(64, 1, _gqa(16)),
        write(8, 1024, _gqa(16)),
        write(8, 1024, _gqa(16, "fp8")),
    ),
    "build": (build(256, 4096, _gqa(16)),),
}
"""On one H200. The rivals' own figures for these shapes set the bars."""

CPU: Groups = {
    "decode": (
        decode(8, 4096, _gqa(128)),
        decode(8, 16384, _gqa(128)),
        decode(1, 32768, _gqa(128)),
    ),
    "decode-page16": (decode(8, 4096, _gqa(16)),),
    "decode-fp8": (decode(8, 4096, _gqa(128, "fp8")),),
    "decode-int8": (decode(8, 4096, _gqa(128, "int8_per_token_head")),),
    "prefill": (
        prefill(1, 2048, _gqa(128)),
        prefill(1, 512, _gqa(128), context=4096),
    ),
    "verify": tuple(verify(8, query, 4096, _gqa(128)) for query in (1, 2, 4, 8)),
    "mixed": (mixed(512, 2048, 15, 1024, _gqa(128)),),
    "write": (write(16, 1, _gqa(128)), write(1, 1024, _gqa(128))),
    "build": (build(256, 4096, _gqa(128)),),
}
"""On a few CPU cores. Pages of 128: what CPU kernels like (vLLM's takes multiples of 32 only)."""

PRESETS: Mapping[str, Groups] = {"h200": H200, "cpu": CPU}


def preset(name: str) -> Groups:
    """The groups of a preset.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if name not in PRESETS:
        raise ConfigurationError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
