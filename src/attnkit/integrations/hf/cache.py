"""RowPages: the keys and values of one `generate` call, in our pages; and how transformers sees them.

In: per step, how many tokens each row of the batch gets and how many of its first ones are padding.
Out: the step's batches, pages that grow with it, and `PagedLayer`, which stands in a `DynamicCache`
where transformers looks for lengths and asks for rows to be reordered, repeated or cut. The padding in
front of a row is kept nowhere: a row's pages hold its own tokens from position 0 on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from attnkit.contract import CommonAttentionMetadata
from attnkit.errors import ModelError
from attnkit.kvcache.blocks import NULL_BLOCK, BlockPool
from attnkit.kvcache.pool import PagedKVCache
from attnkit.kvcache.tables import BlockManager, RequestBlocks
from attnkit.runner.shared_pages import PagedModel
from attnkit.runner.step import StepRows
from attnkit.upload import Upload


class RowPages:
    """Pages of the rows of a batch that grows step by step.

    Attributes:
        packed: the model they belong to.
        num_tokens: columns in them, padding included: the same for every row.
        padding: int (num_rows,), how many of the first columns are padding; None before the first step.
        has_padding: whether any is.
        num_steps: that were begun.
        cache: the memory; another object when it has grown, None before the first step.
    """

    def __init__(self, packed: PagedModel) -> None:
        self.packed = packed
        self.num_tokens = self.num_steps = 0
        self.padding: np.ndarray | None = None
        self.has_padding = False
        self.cache: PagedKVCache | None = None
        self._rows: list[RequestBlocks] = []
        self._pool = BlockPool(2, enable_prefix_caching=False)
        self._manager = BlockManager(self._pool, packed.kv_plan.retentions)
        self._keeps_past = all(r.is_full for r in packed.kv_plan.retentions)
        # Of the last step: its batches, how many columns were before it, and how many more tokens fit
        # into the pages of all rows.
        self._batches: list[CommonAttentionMetadata] = []
        self._begun, self._room = 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RowPages:
        """Pages of its own for the same model: a prompt computed once and continued several ways."""
        memo[id(self.packed)] = self.packed
        twin = object.__new__(RowPages)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def known_padding(self, who: str, first: np.ndarray, *, has_padding: bool = True) -> np.ndarray:
        """Padding that a mask shows, checked against the cache's, whose object it is if nothing changed.

        Args:
            who: gave the mask, as errors call it.
            first: int (num_rows,), how many of each row's first columns are hidden, all of them if need
                be.
            has_padding: whether any is.

        Raises:
            ModelError: the cache has other rows, or other padding.
        """
        self.check_num_rows(len(first))
        known, past = self.padding, self.num_tokens
        if known is None:
            return first
        if not has_padding and not self.has_padding:
            return known
        if (np.minimum(first, past) != np.minimum(known, past)).any():
            raise ModelError(
                f"{who} was given an attention_mask that hides {first.tolist()} tokens at the rows' "
                f"beginnings, but {known.tolist()} are padding in its cache; pass the mask it was "
                "filled with, and ones"
            )
        return known if np.array_equal(first, known) else first

    def check_num_rows(self, num_rows: int) -> None:
        """Raises ModelError where the cache has other rows."""
        if self.padding is not None and len(self.padding) != num_rows:
            raise ModelError(
                f"the cache holds {len(self.padding)} rows and the batch has {num_rows}; start with an "
                "empty cache, or repeat or select its rows first"
            )

    def begin(self, num_new: int, padding: np.ndarray) -> list[CommonAttentionMetadata]:
        """Reserve pages for a step and describe it. Nothing counts until `commit`.

        Args:
            num_new: columns of the step.
            padding: int (num_rows,), how many of the first columns are padding, this step's included;
                as many rows as before.

        Returns:
            One batch per group of `packed.kv_plan`.
        """
        self.num_steps += 1
        follows = self._begun + 1 == self.num_tokens and padding is self.padding
        if follows and num_new == 1 and self._room > 0:
            self._begun, self._room = self.num_tokens, self._room - 1
            self._batches = _a_token_later(self._batches)
            return self._batches
        num_rows = len(padding)
        if not self._rows:
            self._rows = [self._manager.new_request() for _ in range(num_rows)]
        seq_lens = self.num_tokens + num_new - padding
        self._reserve(seq_lens, np.maximum(self.num_tokens - padding, 0))
        plan = self.packed.kv_plan
        upload = Upload(self.packed.device)
        tables = [[row.tables[g] for row in self._rows] for g in range(len(plan.groups))]
        rows = StepRows(
            upload,
            np.full(num_rows, num_new),
            seq_lens,
            tables,
            [r.block_size for r in plan.retentions],
            self.packed.blocks_per_block,
        )
        host, moved = upload.send()
        starts = torch.full((num_rows,), self.num_tokens == 0 or num_new > 1)
        self._batches, self._begun = rows.batches(host, moved, starts), self.num_tokens
        self._room = 0
        if self._keeps_past and not starts[0] and seq_lens.min() > 0:
            sizes = np.array([r.block_size for r in plan.retentions])
            self._room = int((-seq_lens[:, None] % sizes).min())
        return self._batches

    def commit(self, num_new: int, padding: np.ndarray) -> None:
        """The step that was begun has been computed."""
        self.num_tokens += num_new
        if padding is not self.padding:
            self.padding, self.has_padding = padding, bool((padding > 0).any())
        if not self._keeps_past:
            for row, length in zip(self._rows, self._lengths(), strict=True):
                self._manager.settle(row, (), length)

    def clear(self) -> None:
        """Forget everything."""
        for row in self._rows:
            self._manager.release(row)
        self._rows, self.padding, self.num_tokens = [], None, 0
        self.has_padding, self._room = False, 0

    def select(self, indices: Sequence[int]) -> None:
        """Rows as named, in this order, some perhaps several times; they share pages until they part."""
        if self.padding is None:
            return
        before = self._rows
        self._rows = [self._manager.fork(before[i]) for i in indices]
        self.padding = self.padding[list(indices)]
        self.has_padding, self._room = bool((self.padding > 0).any()), 0
        for row in before:
            self._manager.release(row)

    def cut(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` columns.

        Raises:
            ModelError: pages that are needed then were given back, since they lay outside of a window;
                nothing was changed.
        """
        if self.padding is None or num_tokens == 0:
            return
        lengths = np.maximum(self.num_tokens - num_tokens - self.padding, 0).tolist()
        for row, length in zip(self._rows, lengths, strict=True):
            for retention, table in zip(self._manager.retentions, row.tables, strict=True):
                first = retention.first_block(length)
                if NULL_BLOCK in table[first : -(-length // retention.block_size)]:
                    raise ModelError(
                        f"the cache cannot forget {num_tokens} tokens: those a sliding window sees then "
                        "are gone; call activate_past_recording() on the cache before generating"
                    )
        self.num_tokens = max(0, self.num_tokens - num_tokens)
        self._room = 0

    def keep_past(self) -> None:
        """Give no page back before `clear`, so that `cut` always works."""
        self._keeps_past = True

    def _lengths(self) -> list[int]:
        assert self.padding is not None
        return np.maximum(self.num_tokens - self.padding, 0).tolist()

    def _reserve(self, seq_lens: np.ndarray, contexts: np.ndarray) -> None:
        """Blocks for every token, those that will be written into held by one row alone."""
        missing = sum(
            self._manager.num_missing(row, n)
            for row, n in zip(self._rows, seq_lens.tolist(), strict=True)
        )
        # A row may have to own one more block in each group.
        needed = missing + len(self._rows) * len(self._manager.retentions)
        if self.cache is None or needed > self._pool.num_free:
            held = self._pool.num_blocks
            self._grow(held + needed + held // 2)
        assert self.cache is not None
        moves = []
        for row, seq_len, context in zip(
            self._rows, seq_lens.tolist(), contexts.tolist(), strict=True
        ):
            if seq_len > context:
                moves += self._manager.own_block(row, context)
            self._manager.grow(row, seq_len)
        self.cache.copy_blocks(self.cache, moves)

    def _grow(self, num_blocks: int) -> None:
        cache = self.packed.allocate(num_blocks)
        if self.cache is not None:
            cache.copy_blocks(self.cache, [(i, i) for i in range(1, self.cache.num_blocks)])
        self.cache = cache
        self._pool.extend(num_blocks)


def _a_token_later(batches: Sequence[CommonAttentionMetadata]) -> list[CommonAttentionMetadata]:
    """Batches of a decode step, for the step after it in the same pages.

    To describe a step anew takes ten times as long, which a small model feels.
    """
    first = batches[0]
    assert first.positions is not None
    assert first.seq_lens_cpu_upper_bound is not None
    positions, seq_lens = first.positions + 1, first.seq_lens + 1
    on_host = seq_lens if seq_lens.device.type == "cpu" else first.seq_lens_cpu_upper_bound + 1
    return [
        batch.replace(
            positions=positions,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=on_host,
            max_seq_len=batch.max_seq_len + 1,
            slot_mapping=batch.slot_mapping + 1,
        )
        for batch in batches
    ]


class PagedLayer(CacheLayerMixin):
    """One layer of a `DynamicCache` whose keys and values are in pages.

    All layers share them: lengths can be asked of any, and the first does what is asked of all.

    Attributes:
        pages: of every layer.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, pages: RowPages, leads: bool) -> None:
        super().__init__()
        self.pages = pages
        self._leads = leads

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        return

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Never called by the model that the pages belong to, which gets no cache."""
        raise ModelError(
            "this cache lies in attnkit's pages and was handed to something else than the model that "
            "attnkit.hf.enable was given; give each model a cache of its own"
        )

    def get_seq_length(self) -> int:
        return self.pages.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.pages.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        return

    def prefetch(self) -> None:
        return

    def reset(self) -> None:
        if self._leads:
            self.pages.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self._leads:
            self.pages.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._leads and self.pages.padding is not None:
            num_rows = len(self.pages.padding)
            self.pages.select([row for row in range(num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._leads and self.pages.padding is not None:
            self.pages.select(torch.arange(len(self.pages.padding))[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        # Above 0 it is the length to keep, which older versions allow.
        if self._leads and tokens_to_remove < 0:
            self.pages.cut(-tokens_to_remove)
        elif self._leads and 0 < tokens_to_remove < self.pages.num_tokens:
            self.pages.cut(self.pages.num_tokens - tokens_to_remove)

    def activate_past_recording(self) -> None:
        self.pages.keep_past()


def pages_in(cache: Any, packed: PagedModel) -> RowPages:
    """The pages behind transformers' cache object; an empty `DynamicCache` gets some.

    Raises:
        ModelError: a cache of another kind, of another model, or with keys that others computed.
    """
    layers = getattr(cache, "layers", ())
    if layers and isinstance(layers[0], PagedLayer):
        pages = layers[0].pages
        if pages.packed is not packed:
            raise ModelError(
                "the cache belongs to another model, or to this one before attnkit.hf.enable was called "
                "again; start with an empty DynamicCache"
            )
        return pages
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        raise ModelError(
            f"{type(cache).__name__} cannot hold attnkit's pages; leave cache_implementation out, or "
            "pass a DynamicCache without offloading"
        )
    if cache.get_seq_length() > 0:
        raise ModelError(
            f"the cache holds {cache.get_seq_length()} tokens that were not computed by attnkit; start "
            "with an empty DynamicCache"
        )
    pages = RowPages(packed)
    cache.layer_class_to_replicate = None
    cache.layers[:] = [PagedLayer(pages, leads=i == 0) for i in range(len(packed.layers))]
    return pages
