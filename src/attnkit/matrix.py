"""The capability matrix: what each backend says of itself, as rows of text.

In: backend classes. Out: `capability_matrix`, one row per feature and one cell per backend, read
from the same methods that selection asks. The command line prints it, the docs hold it, and the
conformance kit checks each yes and each no. Backends over latents (MLA) have a matrix of their own,
`mla_matrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attnkit.contract import (
    CACHE_DTYPES,
    KNOWN_DEVICES,
    AttentionBackend,
    AttentionType,
    FullAttentionSpec,
    MLADimensions,
    VllmConfig,
)

_MOST = 1024
"""Sizes are asked up to this one."""
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


def mla_matrix(backends: dict[str, type[AttentionBackend]]) -> list[tuple[str, list[str]]]:
    """As `capability_matrix`, for backends over latents."""
    common = ("devices", "dtypes", "cache formats", "kernel block sizes", "layouts")
    wanted = (*common, *MLA_FLAGS, "graph capture")
    rows = [row for row in capability_matrix(backends) if row[0] in wanted]
    classes = list(backends.values())
    rows[3:3] = [
        ("latents, 64 rotated beside", [_sizes(lambda n, c=c: _takes(c, n, 64)) for c in classes]),
        ("rotated, beside 512", [_sizes(lambda n, c=c: _takes(c, 512, n)) for c in classes]),
    ]
    return rows


def _takes(backend: type[AttentionBackend], kv_lora_rank: int, qk_rope_head_dim: int) -> bool:
    """Whether latents of such sizes work, with heads as DeepSeek-V3's."""
    d = MLADimensions(
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=128,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=128,
    )
    fits = backend.supports_head_size(d.latent_size)
    return fits and backend.supports_mla_dimensions(d, "auto") is None


def capability_matrix(
    backends: dict[str, type[AttentionBackend]],
) -> list[tuple[str, list[str]]]:
    """Rows (feature, one answer per backend), in the order of `backends`; without features that none
    of them has."""
    classes = list(backends.values())
    rows = [
        ("devices", [_devices(c) for c in classes]),
        ("dtypes", [_list(_short(d) for d in _DTYPES if c.supports_dtype(d)) for c in classes]),
        (
            "cache formats",
            [_list(n for n in CACHE_DTYPES if c.supports_kv_cache_dtype(n)) for c in classes],
        ),
        ("head sizes", [_sizes(c.supports_head_size) for c in classes]),
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
    for row, method in FLAGS.items():
        answers = [getattr(c, method)() for c in classes]
        if any(answers):
            rows.append((row, [_flag(answer) for answer in answers]))
    rows.append(("graph capture", [_graphs(c) for c in classes]))
    return rows


def matrix_markdown(names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    """A matrix as a Markdown table, one column per name."""
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in rows]
    return "\n".join(lines) + "\n"


def _devices(backend: type[AttentionBackend]) -> str:
    return _list(str(d) for d in KNOWN_DEVICES if backend.supports_compute_capability(d))


def _sizes(works: Callable[[int], bool]) -> str:
    """Sizes that work, in words."""
    able = [size for size in range(1, _MOST + 1) if works(size)]
    if len(able) == _MOST:
        return "any"
    step = able[1] - able[0] if len(able) > 1 else 1
    if len(able) > 3 and able == list(range(able[0], able[-1] + 1, step)):
        return f"{able[0]} to {able[-1]} in steps of {step}"
    return _list(str(size) for size in able)


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
