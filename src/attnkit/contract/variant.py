"""AttentionVariant: one description of a layer's score and mask, read by every kernel.

In: the arguments an impl is constructed with. Out: a frozen value that the reference, the CPU
kernels, the GPU kernels and the oracle all read, so that a new variant is added here once and each
backend either does it or refuses it.

The order of a score is fixed: q.k * scale, softcap, ALiBi, mask, softmax with the sink as one more
logit that has no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnkit.arguments import check_count, check_flags, check_kind, check_number
from attnkit.contract.types import AttentionType
from attnkit.errors import ConfigurationError

_FLOAT32 = torch.finfo(torch.float32)
_LONGEST = torch.iinfo(torch.int32).max
"""Tokens, since lengths are int32: a wider window hides nothing more."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class AttentionVariant:
    """A layer's score and mask. Build it with `from_impl_args`, which checks every value.

    Attributes:
        scale: factor on q.k.
        sliding_window: a query sees itself and the `sliding_window - 1` keys before it; in encoder
            types and non-causal batches, keys at a distance below it on both sides. At most the longest
            request there can be. None: no window.
        logits_soft_cap: c in c * tanh(score / c). None: no cap.
        alibi_slopes: float32 (num_heads,): slope * (k_pos - q_pos) is added to the score.
        use_alibi_sqrt: add -slope * sqrt(q_pos - k_pos) for keys at or before the query instead.
        sinks: float32 (num_heads,): one more logit per head in the denominator, neither scaled nor
            capped.
        attn_type: which queries attend to which keys.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    use_alibi_sqrt: bool = False
    sinks: torch.Tensor | None = None
    attn_type: AttentionType = AttentionType.DECODER

    @classmethod
    def from_impl_args(
        cls,
        *,
        num_heads: int,
        scale: float,
        alibi_slopes: Sequence[float] | torch.Tensor | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
    ) -> AttentionVariant:
        """Check and normalise an impl's constructor arguments.

        `logits_soft_cap` 0 means off, as in the seeds. Slopes and sinks become float32 tensors
        where they are, lists on the CPU.

        Raises:
            ConfigurationError: a value is outside what its attribute allows.
        """
        check_count("num_heads", num_heads)
        check_number("scale", scale)
        check_count("sliding_window", sliding_window, optional=True)
        check_number("logits_soft_cap", logits_soft_cap, optional=True)
        # Kernels compute in float32: what is infinite or nothing there gives NaN without a word.
        if abs(scale) > _FLOAT32.max:
            raise ConfigurationError(
                f"scale {scale} is not allowed; give a number that float32 holds"
            )
        if logits_soft_cap and not _FLOAT32.tiny <= logits_soft_cap <= _FLOAT32.max:
            raise ConfigurationError(
                f"logits_soft_cap {logits_soft_cap} is not allowed; give a number > 0 that float32 "
                f"holds ({_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}), or None"
            )
        check_flags({"use_alibi_sqrt": use_alibi_sqrt})
        check_kind("sinks", sinks, torch.Tensor, "a float tensor (num_heads,)", optional=True)
        if sinks is not None and not sinks.is_floating_point():
            raise ConfigurationError(f"sinks are {sinks.dtype}; give a float tensor (num_heads,)")
        if use_alibi_sqrt and alibi_slopes is None:
            raise ConfigurationError("use_alibi_sqrt needs alibi_slopes; give one slope per head")
        try:
            kind = AttentionType(attn_type)
        except ValueError:
            names = ", ".join(t.value for t in AttentionType)
            raise ConfigurationError(
                f"attn_type {attn_type!r} is not known; use one of {names}"
            ) from None
        return cls(
            scale=float(scale),
            sliding_window=None if sliding_window is None else min(sliding_window, _LONGEST),
            logits_soft_cap=float(logits_soft_cap) if logits_soft_cap else None,
            alibi_slopes=_per_head("alibi_slopes", alibi_slopes, num_heads, lowest=False),
            use_alibi_sqrt=use_alibi_sqrt,
            sinks=_per_head("sinks", sinks, num_heads, lowest=True),
            attn_type=kind,
        )

    def to(self, device: torch.device | str) -> AttentionVariant:
        """The same variant with its per-head tensors on `device`; itself if nothing moves."""
        device = torch.device(device)
        tensors = [t for t in (self.alibi_slopes, self.sinks) if t is not None]
        if all(t.device == device for t in tensors):
            return self
        return AttentionVariant(
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes.to(device),
            use_alibi_sqrt=self.use_alibi_sqrt,
            sinks=None if self.sinks is None else self.sinks.to(device),
            attn_type=self.attn_type,
        )


def _per_head(
    name: str,
    values: Sequence[float] | torch.Tensor | None,
    num_heads: int,
    *,
    lowest: bool,
) -> torch.Tensor | None:
    """`values` as float32 (num_heads,). `lowest`: -inf is allowed (a sink that adds nothing)."""
    if values is None:
        return None
    try:
        tensor = torch.as_tensor(values).detach().to(torch.float32).contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{name} {values!r} is not allowed; give {num_heads} numbers, one per head"
        ) from error
    if tensor.shape != (num_heads,):
        raise ConfigurationError(
            f"{name} has shape {tuple(tensor.shape)}, but the layer has {num_heads} heads; "
            f"give {num_heads} numbers"
        )
    allowed = torch.isfinite(tensor) | (torch.isneginf(tensor) if lowest else False)
    if not bool(allowed.all()):
        bad = tensor[~allowed][0].item()
        raise ConfigurationError(
            f"{name} contains {bad}; give finite numbers that float32 holds"
            + (", or -inf for a sink that adds nothing" if lowest else "")
        )
    return tensor
