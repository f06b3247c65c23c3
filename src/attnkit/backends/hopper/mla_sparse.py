"""HopperMLASparseBackend: attention over latents to chosen keys on sm_90.

In: a `HopperMLASparseMetadata`, one layer's tensors, its latent cache, and per query a list of
positions. Out: attention over exactly those. One launch gathers the rows that are named into pages of
16-bit numbers and says how many there are (`latent_gather`); the decode of `hopper_mla` then runs over
these pages. So rows of every format are read once for all heads, and the decode sees no codes.
Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnkit.backends.hopper.mla import HopperMLABackend, HopperMLAImpl
from attnkit.backends.hopper.mla_sparse_plan import (
    HopperMLASparseMetadata,
    HopperMLASparseMetadataBuilder,
    Lists,
)
from attnkit.backends.hopper.tuning import (
    CHOSEN_CACHE_DTYPES,
    CHOSEN_PAGE,
    head_tiles,
    latent_config,
)
from attnkit.contract import AttentionBackend, AttentionLayer, KVCacheSpec, MultipleOf
from attnkit.kvcache.formats import layer_scale
from attnkit.mla.sparse import ChosenRows, SparseLatentImpl, lists_of

if TYPE_CHECKING:
    from attnkit.backends.kernel_call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Source:
    """Where the rows of T lists are.

    Attributes:
        lists: int32 (T, k), positions, last stride 1.
        table: int32 (R, W), the blocks of each request.
        cache: (num_blocks, block_size, C).
        owners: int32 (T, 2), request of a list and keys that it may name; None: as planned.
    """

    lists: torch.Tensor
    table: torch.Tensor
    cache: torch.Tensor
    owners: torch.Tensor | None


class HopperMLASparseBackend(HopperMLABackend):
    """`hopper_mla` over chosen keys, cached as they are, as float8 codes, or as DeepSeek's fp8 rows."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CHOSEN_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "hopper_mla_sparse"

    @staticmethod
    def get_impl_cls() -> type[HopperMLASparseImpl]:
        return HopperMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[HopperMLASparseMetadataBuilder]:  # type: ignore[override]
        return HopperMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        # Rows are read alone.
        return [MultipleOf(1)]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        """Below `triton_mla_sparse`: 0.42 to 1.03 of its time (benchmarks/mla-h200.json)."""
        return 0.5


class HopperMLASparseImpl(SparseLatentImpl[Any], HopperMLAImpl):
    """One layer whose queries attend to listed keys. Only launches between call and return."""

    index_backend: ClassVar[str] = "triton"

    @staticmethod
    def get_backend_cls() -> type[AttentionBackend]:
        return HopperMLASparseBackend

    def forward_mqa(  # type: ignore[override]
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HopperMLASparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the first rows of the indexer's lists.

        Raises:
            BatchError: as `lists_of`.
            CacheError: the cache has another dtype than `q`, or rows that are not multiples of 16 bytes
                apart.
        """
        from attnkit.backends.hopper.latent_launch import LatentOperands

        assert self.indexer is not None, "checked when the impl was made"
        query, rope, scale = self._scaled_parts(q)
        num_tokens = query.shape[0]
        lists = lists_of(self.indexer, num_tokens, query.device)
        output, lse = self._outputs(query, captured=attn_metadata.is_captured)
        k_scale = layer_scale("k_scale", layer._k_scale, 1) if self._is_coded else None
        kind = Lists(self.num_heads, lists.shape[1], self.lists_are_distinct)
        rows, table = attn_metadata.planner.rows(kind.size, query.dtype)
        source = self._source(lists, kv_c_and_k_pe_cache, attn_metadata, query.dtype)
        for chosen in attn_metadata.work(kind):
            some = slice(chosen.first_token, min(chosen.end_token, num_tokens))
            if some.start >= some.stop:  # A captured graph has more queries.
                break
            config = latent_config(
                self.num_heads,
                CHOSEN_PAGE,
                chosen.work.tile_rows,
                lse=lse is not None,
                scaled=self._is_coded,
            )
            self._gather(source, some, rows, chosen, layer._k_scale)
            operands = LatentOperands(
                query=query[some],
                query_rope=rope[some],
                cache=rows,
                output=output[some],
                lse=None if lse is None else lse[some],
                block_table=table,
                scale=scale,
                k_scale=k_scale,
            )
            num_units = (some.stop - some.start) * config.head_tiles
            work = replace(chosen.work, units=chosen.work.units[:num_units])
            self._launch(rows, operands, work, config)
        return output, lse

    def _source(
        self,
        lists: torch.Tensor,
        cache: torch.Tensor,
        attn_metadata: HopperMLASparseMetadata,
        dtype: torch.dtype,
    ) -> _Source:
        plan = attn_metadata.decode
        assert plan is not None, "a batch without queries has no rows to serve"
        hot = self.hisparse_cache
        if hot is None:
            self._elements(cache, dtype)
            lists = lists if lists.stride(1) == 1 else lists.contiguous()
            return _Source(lists=lists, table=plan.block_table, cache=cache, owners=None)
        # What is listed comes into pages of one token first, and is then all that a list names.
        chosen = ChosenRows.of(lists, plan, cache.shape[1])
        pages, table = hot.pages_of(cache, chosen)
        self._elements(pages, dtype)
        places = torch.arange(lists.shape[1], dtype=torch.int32, device=lists.device)
        queries = torch.arange(lists.shape[0], dtype=torch.int32, device=lists.device)
        return _Source(
            lists=places.expand(lists.shape),
            table=table,
            cache=pages,
            owners=torch.stack([queries, chosen.num_chosen], dim=1),
        )

    def _gather(
        self, source: _Source, some: slice, rows: torch.Tensor, chosen: Any, k_scale: torch.Tensor
    ) -> None:
        """Copy the rows of some queries into `rows`, and tell their plan how many each has."""
        from attnkit.backends.hopper import latent_gather_launch

        lists, table, cache = source.lists[some], source.table, source.cache
        owners = chosen.owners if source.owners is None else source.owners[some]

        def call() -> KernelCall:
            pages = self._pages(cache, k_scale)
            groups = head_tiles(self.num_heads, chosen.work.tile_rows)
            return latent_gather_launch.gather_call(
                lists, table, pages, rows, owners, chosen.work, groups
            )

        self._cache_repeats.launch(
            ("gather", latent_gather_launch.block_k(lists), rows.dtype, table.dtype),
            cache,
            latent_gather_launch.gather_grid(lists),
            latent_gather_launch.gather_changes(lists, table, rows, owners, chosen.work),
            call,
        )
