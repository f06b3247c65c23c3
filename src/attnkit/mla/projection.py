"""KvBProjection: the two matrices of every head that expand a latent, taken from `kv_b_proj` once.

In: any module that maps a latent to the keys (without rotation) and values of all heads, whatever its
weights are stored as. Out: plain weights in the layer's dtype, and three uses of them: expand latents,
absorb queries, turn attended latents into values.
"""

from __future__ import annotations

import torch
from torch import nn

from attnkit.contract import MLADimensions
from attnkit.errors import ConfigurationError

_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class KvBProjection(nn.Module):
    """`kv_b_proj` of a layer as dense weights; what an impl is given as its `kv_b_proj`.

    Weights of the layer's own dtype are not copied. `absorb` reads them, at construction and whenever
    it is called again; until then a change of the module does not show.

    Attributes:
        weight: (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank), a row per number of a
            head's key and then of its value.
    """

    weight: torch.Tensor

    def __init__(
        self,
        kv_b_proj: nn.Module,
        num_heads: int,
        dimensions: MLADimensions,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            kv_b_proj: of the model, without a bias. It may still be on the meta device, if `absorb` is
                called when it is loaded.
            num_heads: heads it expands to.
            dimensions: of the layer.
            dtype: of the weights here.
            device: where they are used.

        Raises:
            ConfigurationError: it has a bias or expands to other sizes.
        """
        super().__init__()
        # Not registered: the module is the model's, and would be moved and saved twice.
        self._source = [kv_b_proj]
        self.num_heads, self.dimensions = num_heads, dimensions
        if getattr(kv_b_proj, "bias", None) is not None:
            raise ConfigurationError(
                "kv_b_proj has a bias, which cannot be absorbed into queries; give one without"
            )
        self._device = device
        weight = getattr(kv_b_proj, "weight", None)
        loaded = not (isinstance(weight, torch.Tensor) and weight.is_meta)
        empty = torch.empty(0, dtype=dtype, device=device)
        self.register_buffer("weight", empty, persistent=False)
        if loaded:
            self.absorb(dtype)

    @classmethod
    def of(cls, kv_b_proj: nn.Module, num_heads: int, dimensions: MLADimensions) -> KvBProjection:
        """What an impl was given as `kv_b_proj`: a layer's projection as it is, a model's module in its
        own dtype (float32 where its weights are codes) and place."""
        if isinstance(kv_b_proj, KvBProjection):
            return kv_b_proj
        weight = getattr(kv_b_proj, "weight", None)
        plain = isinstance(weight, torch.Tensor) and weight.dtype in _PLAIN
        dtype = weight.dtype if plain else torch.float32  # type: ignore[union-attr]
        device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cpu")
        return cls(kv_b_proj, num_heads, dimensions, dtype, device)

    @torch.no_grad()
    def absorb(self, dtype: torch.dtype) -> None:
        """Take the weights anew.

        Raises:
            ConfigurationError: they have another shape than the dimensions say.
        """
        d = self.dimensions
        shape = (self.num_heads * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank)
        weight = _dense_weight(self._source[0], d.kv_lora_rank, dtype, self._device)
        if weight.shape != shape:
            raise ConfigurationError(
                f"kv_b_proj has a weight of shape {tuple(weight.shape)}; {self.num_heads} heads of "
                f"{d.qk_nope_head_dim} + {d.v_head_dim} from latents of {d.kv_lora_rank} need {shape}"
            )
        self.weight = weight.detach().to(self._device, dtype)

    @property
    def per_head(self) -> torch.Tensor:
        """The weight as (num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)."""
        return self.weight.view(self.num_heads, -1, self.dimensions.kv_lora_rank)

    def forward(self, kv_c: torch.Tensor) -> torch.Tensor:
        """Latents (..., kv_lora_rank) -> keys without rotation and values of all heads, flat."""
        return nn.functional.linear(kv_c, self.weight)

    def expand(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values per head.

        Args:
            kv_c: (..., kv_lora_rank), in the weights' dtype.
            k_pe: (..., qk_rope_head_dim), likewise.

        Returns:
            (..., num_heads, qk_head_dim) and (..., num_heads, v_head_dim).
        """
        d = self.dimensions
        heads = self(kv_c).unflatten(-1, (self.num_heads, -1))
        k_nope, value = heads.split([d.qk_nope_head_dim, d.v_head_dim], dim=-1)
        shared = k_pe.unsqueeze(-2).expand(*k_nope.shape[:-1], d.qk_rope_head_dim)
        return torch.cat([k_nope, shared], dim=-1), value

    def absorb_queries(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Queries (num_tokens, num_heads, qk_nope_head_dim) -> (num_tokens, num_heads, kv_lora_rank)."""
        w_uk = self.per_head[:, : self.dimensions.qk_nope_head_dim]
        return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)

    def values_of(self, attended: torch.Tensor, output: torch.Tensor) -> None:
        """Attended latents (num_tokens, num_heads, kv_lora_rank) -> `output` (num_tokens, num_heads,
        v_head_dim), written in place."""
        w_uv = self.per_head[:, self.dimensions.qk_nope_head_dim :]
        values = torch.bmm(attended.to(w_uv.dtype).transpose(0, 1), w_uv.transpose(1, 2))
        output.copy_(values.transpose(0, 1))


def _dense_weight(
    module: nn.Module, kv_lora_rank: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The weight as plain numbers (out, in).

    Plain weights are taken as they are. float8 weights that come with their scales are multiplied out.
    Anything else (packed integers, a wrapper without a weight) is asked what it makes of the identity.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and _is_readable(weight):
        if weight.dtype in _PLAIN:
            return weight
        scale = getattr(module, "weight_scale_inv", None)
        scale = getattr(module, "weight_scale", None) if scale is None else scale
        if weight.dtype.itemsize == 1 and weight.is_floating_point() and scale is not None:
            return weight.float() * _spread(scale.float(), weight.shape)
    identity = torch.eye(kv_lora_rank, dtype=dtype, device=device)
    expanded = module(identity)
    # Engines' linear layers return their bias too.
    expanded = expanded[0] if isinstance(expanded, tuple) else expanded
    return expanded.T


def _is_readable(weight: torch.Tensor) -> bool:
    """It is a matrix of numbers: a weight that oneDNN packed has a shape and a dtype only."""
    is_plain = type(weight.data) is torch.Tensor and weight.layout is torch.strided
    return is_plain and weight.dim() == 2


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale per tensor, row or block as one per number of a weight.

    Raises:
        ConfigurationError: its shape divides the weight's into no blocks.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    scale = scale[:, None] if scale.dim() == 1 else scale
    blocks = [_block(size, n) for size, n in zip(shape, scale.shape, strict=False)]
    if scale.dim() != 2 or None in blocks:
        raise ConfigurationError(
            f"kv_b_proj has a scale of shape {tuple(scale.shape)} for a weight of {tuple(shape)}; give "
            "one number, one per row, or one per block of 128 or of equal parts"
        )
    for axis, block in enumerate(blocks):
        assert block is not None
        scale = scale.repeat_interleave(block, axis)
    return scale[: shape[0], : shape[1]]


def _block(size: int, num_blocks: int) -> int | None:
    """Numbers that share a scale along an axis; the last block of 128 may be cut."""
    if -(-size // 128) == num_blocks:
        return 128
    return None if size % num_blocks else size // num_blocks
