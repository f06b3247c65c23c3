"""The capability matrix: what each backend says of itself, as rows of text.

In: backend classes. Out: `capability_matrix`, one row per feature and one cell per backend, read
from the same methods that selection asks. The command line prints it, the docs hold it, and the
conformance kit checks each yes and each no. Backends over latents (MLA) have a matrix of their own,
`mla_matrix`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnkit.contract import (
    CACHE_DTYPES,
    AttentionBackend,
    AttentionType,
    DeviceCapability,
    FullAttentionSpec,
    MLADimensions,
    VllmConfig,
)

DEVICES = ("cpu", "sm_80", "sm_90", "sm_100")
_HEAD_SIZES = range(8, 513, 8)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

FLAGS: dict[str, str] = {
    "sliding window": "supports_sliding_window",
    "logits soft cap": "supports_logits_soft_cap",
    "attention sinks": "supports_sink",
    "ALiBi": "supports_alibi",
    "ALiBi, square root": "supports_alibi_sqrt",
    "non-causal decoder": "supports_non_causal",
    "log-sum-exp output": "supports_lse",
    "multimodal prefix": "supports_mm_prefix",
    "R-SWA": "supports_rswa",
    "tree mask": "supports_tree_mask",
    "per-head KV scales": "supports_per_head_quant_scales",
    "batch invariance": "supports_batch_invariance",
    "device-side query lengths": "supports_device_cpu_query_lens_mismatch",
    "KV connector": "supports_kv_connector",
    "DCP": "supports_dcp",
    "PCP": "supports_pcp",
    "MLA": "is_mla",
    "sparse": "is_sparse",
}
"""Row of the matrix -> the class method that answers it."""


MLA_FLAGS = (
    "log-sum-exp output",
    "batch invariance",
    "device-side query lengths",
    "KV connector",
    "DCP",
    "PCP",
    "sparse",
)
"""Rows of `FLAGS` that backends over latents answer."""

_LATENTS = {
    "512 + 64": MLADimensions(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    "256 + 64": MLADimensions(
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128
    ),
    "256 + 32": MLADimensions(
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    ),
}
"""Latents of models: DeepSeek-V2 and V3 and most others; Mistral 4; MiniCPM3."""


def mla_matrix(backends: dict[str, type[AttentionBackend]]) -> list[tuple[str, list[str]]]:
    """As `capability_matrix`, for backends over latents."""
    common = ("devices", "dtypes", "cache formats", "kernel block sizes", "layouts")
    wanted = (*common, *MLA_FLAGS, "graph capture")
    rows = [row for row in capability_matrix(backends) if row[0] in wanted]
    rows.insert(
        3,
        (
            "latents",
            [
                _list(
                    name
                    for name, d in _LATENTS.items()
                    if c.supports_head_size(d.latent_size)
                    and c.supports_mla_dimensions(d, "auto") is None
                )
                for c in backends.values()
            ],
        ),
    )
    return rows


def capability_matrix(
    backends: dict[str, type[AttentionBackend]],
) -> list[tuple[str, list[str]]]:
    """Rows (feature, one answer per backend), in the order of `backends`."""
    classes = list(backends.values())
    rows = [
        ("devices", [_list(d for d in DEVICES if _runs_on(c, d)) for c in classes]),
        ("dtypes", [_list(_short(d) for d in _DTYPES if c.supports_dtype(d)) for c in classes]),
        (
            "cache formats",
            [_list(n for n in CACHE_DTYPES if c.supports_kv_cache_dtype(n)) for c in classes],
        ),
        ("head sizes", [_head_sizes(c) for c in classes]),
        (
            "kernel block sizes",
            [_list(str(s) for s in c.get_supported_kernel_block_sizes()) for c in classes],
        ),
        ("layouts", [_layouts(c) for c in classes]),
        (
            "attention types",
            [_list(t.value for t in AttentionType if c.supports_attn_type(t)) for c in classes],
        ),
        ("value head size apart", [_flag(c.supports_head_size_v(128, 64)) for c in classes]),
    ]
    rows += [(row, [_flag(getattr(c, method)()) for c in classes]) for row, method in FLAGS.items()]
    rows.append(("graph capture", [_graphs(c) for c in classes]))
    return rows


def matrix_markdown(names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    """A matrix as a Markdown table, one column per name."""
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in rows]
    return "\n".join(lines) + "\n"


def _runs_on(backend: type[AttentionBackend], device: str) -> bool:
    return backend.supports_compute_capability(DeviceCapability.parse(device))


def _head_sizes(backend: type[AttentionBackend]) -> str:
    able = [s for s in _HEAD_SIZES if backend.supports_head_size(s)]
    if not able:
        return "none"
    whole = list(range(able[0], able[-1] + 1, 8))
    if able == whole and len(able) > 3:
        return f"{able[0]} to {able[-1]} in steps of 8"
    return _list(str(s) for s in able)


def _layouts(backend: type[AttentionBackend]) -> str:
    layouts: Sequence[object] | None = backend.supported_kv_cache_layouts()
    return "any" if layouts is None else _list(getattr(x, "name", str(x)) for x in layouts)


def _graphs(backend: type[AttentionBackend]) -> str:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return backend.get_builder_cls().get_cudagraph_support(VllmConfig(), spec).name.lower()


def _flag(answer: bool) -> str:
    return "yes" if answer else "no"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(items: object) -> str:
    return ", ".join(items) or "none"  # type: ignore[arg-type]
