"""LatentPages: a latent cache as the kernels read it; LatentStep: what is new in a decode over latents;
LatentOperands: that over pages.

In: tensors from whoever has them. Out: views of the parts of a row, checked against each other, none of
it copied. Host code; does not need Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnkit.backends.repeat import kind_of
from attnkit.backends.stored import Codes, Stored, float32_view
from attnkit.contract import MLADimensions
from attnkit.kvcache.codecs import FP8_TILE
from attnkit.kvcache.formats import CacheFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentPages:
    """Views of a cache of B blocks of N tokens.

    Attributes:
        latent: (B, N, kv_lora_rank), numbers or codes.
        rotated: (B, N, qk_rope_head_dim), likewise.
        codes: what an element of both is.
        tile_scales: float32 (B, N, kv_lora_rank / 128) beside the codes of a latent; None: none.
        k_scale: the layer's, float32 (1,), of both; None: it has no part.
    """

    latent: torch.Tensor
    rotated: torch.Tensor
    codes: Codes = Codes.NUMBERS
    tile_scales: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        cache: torch.Tensor,
        cache_format: CacheFormat,
        dimensions: MLADimensions,
        k_scale: torch.Tensor,
        *,
        has_e4m3: bool = True,
    ) -> LatentPages:
        """The parts of a layer's cache.

        Args:
            cache: (B, N, C), any strides but the last.
            cache_format: of its rows.
            dimensions: of the layer; they fit the format.
            k_scale: the layer's.
            has_e4m3: the device has a type float8_e4m3fn.

        Raises:
            CacheError: pages are not aligned to the float32 scales in them.
        """
        d = dimensions
        if cache_format.has_own_scales:
            data = cache.view(torch.uint8)
            layout = cache_format.layout(d.kv_lora_rank, d.qk_rope_head_dim)
            latent = data[..., : layout.k_scales]
            scales = slice(layout.k_scales // 4, layout.v_codes // 4)
            return cls(
                latent=latent.view(torch.float8_e4m3fn) if has_e4m3 else latent,
                rotated=data.view(torch.bfloat16)[..., layout.v_codes // 2 :],
                codes=Codes.NUMBERS if has_e4m3 else Codes.E4M3,
                tile_scales=float32_view(data[:, None])[:, 0, :, scales],
            )
        stored = Stored.of(
            cache[:, None],
            cache_format,
            d.kv_lora_rank,
            d.qk_rope_head_dim,
            k_scale,
            k_scale,
            has_e4m3=has_e4m3,
        )
        return cls(
            latent=stored.key[:, 0],
            rotated=stored.value[:, 0],
            codes=stored.codes,
            k_scale=stored.k_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentStep:
    """What absorbed attention reads and writes beside pages. R requests, T tokens.

    Attributes:
        query: (T, num_heads, kv_lora_rank + qk_rope_head_dim).
        output: (T, num_heads, kv_lora_rank).
        lse: float32 (T, num_heads); None: not wanted.
        query_start_loc: int32 (R + 1,).
        kv_lens: int32 (R,).
        block_table: int32 (R, W).
    """

    query: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Requests, padding rows included."""
        return self.kv_lens.shape[0]

    @property
    def head_size_v(self) -> int:
        """Numbers of a head of the output."""
        return self.output.shape[-1]

    @property
    def kind(self) -> tuple[object, ...]:
        """What compiled kernels depend on of all these (`repeat`)."""
        of_batch = (self.query_start_loc, self.kv_lens, self.block_table)
        # Kernels do not look at the alignment of these.
        return (*kind_of(self.query, self.output, self.lse), *(x.dtype for x in of_batch))

    def over(self, pages: LatentPages) -> LatentOperands:
        """These over pages, checked."""
        return LatentOperands(
            query=self.query,
            pages=pages,
            output=self.output,
            lse=self.lse,
            query_start_loc=self.query_start_loc,
            kv_lens=self.kv_lens,
            block_table=self.block_table,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentOperands(LatentStep):
    """What absorbed attention reads and writes.

    Attributes:
        pages: of the cache.
    """

    pages: LatentPages

    def __post_init__(self) -> None:
        q, out, lse, pages = self.query, self.output, self.lse, self.pages
        rank, rope = pages.latent.shape[-1], pages.rotated.shape[-1]
        assert pages.latent.shape[:-1] == pages.rotated.shape[:-1], pages
        assert q.shape[-1] == rank + rope, f"query {q.shape} does not fit {rank} + {rope}"
        assert out.shape == (*q.shape[:2], rank), f"output is {out.shape}"
        for name, x in (
            ("query", q),
            ("latent", pages.latent),
            ("rotated", pages.rotated),
            ("output", out),
        ):
            assert x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} has last stride {x.stride(-1)}"
        assert pages.tile_scales is None or pages.tile_scales.shape[-1] * FP8_TILE == rank, pages
        assert lse is None or (lse.shape == q.shape[:2] and lse.dtype == torch.float32), lse
        assert lse is None or lse.stride(-1) == 1 or lse.shape[-1] == 1, lse.stride()
        assert self.query_start_loc.shape[0] == self.num_reqs + 1, self.query_start_loc.shape
