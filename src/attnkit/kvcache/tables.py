"""RequestBlocks: the block tables of one request, and BlockManager, which fills and empties them.

In: a `BlockPool` and, for each group of layers, how long a token's page is needed (`Retention`). Out:
per request and group a list of block ids by logical position, in which the null block stands where a
page is no longer needed. Prefixes that were computed before are found again across all groups.

A group whose pages follow another rule (recurrent states) brings its own class with the methods of
`Retention`; nothing else here asks for the kind of a group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from attnkit.errors import ConfigurationError
from attnkit.kvcache.blocks import NULL_BLOCK, BlockPool
from attnkit.kvcache.prefix import Prefix, PrefixTree
from attnkit.kvcache.retention import Retention


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens that see each other in both directions, and so are computed in one step.

    Attributes:
        first: position.
        last: position, inside.
        key: what their keys and values depend on: all of their tokens, and images that stand for some.
    """

    first: int
    last: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache holds of a request.

    Attributes:
        num_tokens: tokens at the beginning that need not be computed.
        tables: per group, the block ids of those tokens; null where no later query looks.
    """

    num_tokens: int
    tables: tuple[tuple[int, ...], ...]


class RequestBlocks:
    """Blocks of one request. Read `tables`; only `BlockManager` changes it.

    Attributes:
        tables: per group, block ids by logical position; the null block stands where a page was
            given back.
        prefix_len: tokens that stay visible to all later ones in groups that keep prefixes.
        encoder_len: encoder tokens, for groups that follow the encoder.
        ranges: tokens that see each other, in order.
    """

    __slots__ = ("_num_published", "_prefixes", "encoder_len", "prefix_len", "ranges", "tables")

    def __init__(
        self,
        num_groups: int,
        roots: dict[int, Prefix],
        prefix_len: int,
        encoder_len: int,
        ranges: tuple[TokenRange, ...],
    ) -> None:
        self.prefix_len = prefix_len
        self.encoder_len = encoder_len
        self.ranges = ranges
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self._num_published = [0] * num_groups
        # Block size -> prefixes of 0, 1, 2, ... whole blocks.
        self._prefixes = {block_size: [root] for block_size, root in roots.items()}


class BlockManager:
    """Block tables of all requests over one pool, for one or several groups of layers.

    A block belongs to one group at a time. Groups may differ in block size.

    Attributes:
        pool: the ids.
        retentions: one per group.
        hit_unit: hits are multiples of this many tokens, where a block of every group ends.
        num_queried_tokens: tokens looked up, as far as entered with `count_lookup`.
        num_hit_tokens: tokens of these that were found.
    """

    def __init__(self, pool: BlockPool, retentions: Sequence[Retention]) -> None:
        if not retentions:
            raise ConfigurationError("a block manager needs at least one group of layers; got none")
        if pool.enable_prefix_caching and any(r.follows_encoder for r in retentions):
            raise ConfigurationError(
                "prefixes of an encoder-decoder are not shared, since a request's first step is what "
                "fills its encoder pages; give the pool enable_prefix_caching=False"
            )
        self.pool = pool
        self.retentions = tuple(retentions)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._tree = PrefixTree()
        self._block_sizes = sorted({r.block_size for r in self.retentions})
        self.hit_unit = math.lcm(*self._block_sizes)

    def new_request(
        self,
        extra_keys: tuple[Hashable, ...] = (),
        prefix_len: int = 0,
        encoder_len: int = 0,
        ranges: tuple[TokenRange, ...] = (),
    ) -> RequestBlocks:
        """Empty tables.

        Args:
            extra_keys: what else the contents of pages depend on beside the tokens (a salt, an
                adapter, the hashes of images). Requests share pages only where these are equal.
            prefix_len: tokens (the prompt) that stay visible to all later ones in groups that keep
                prefixes. What is computed behind them depends on how many they are, so in a model with
                such a group no page behind a prefix is shared.
            encoder_len: encoder tokens, for groups that follow the encoder.
            ranges: in order, without overlaps. Pages from a range's first token on are shared where the
                whole range is the same; a hit never ends inside of one.
        """
        roots = {size: self._tree.root(extra_keys) for size in self._block_sizes}
        return RequestBlocks(len(self.retentions), roots, prefix_len, encoder_len, ranges)

    def max_blocks(self, num_tokens: int, max_query_len: int, encoder_len: int = 0) -> int:
        """Most blocks one request of `num_tokens` holds at once, over all groups."""
        return sum(r.max_blocks(num_tokens, max_query_len, encoder_len) for r in self.retentions)

    def find_prefix(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> PrefixHit:
        """The longest beginning of which every group still has what later queries read.

        At least the last token stays out, since its logits are wanted. Changes nothing in the pool.

        Args:
            token_ids: all known tokens of the request.
        """
        if not self.pool.enable_prefix_caching:
            return PrefixHit(0, tuple(() for _ in self.retentions))
        self._extend_prefixes(blocks, token_ids)
        end = min(len(token_ids) - 1, self._num_shareable(blocks, len(token_ids)))
        end = self._hit_end(blocks, end)
        for group, retention in enumerate(self.retentions):
            if retention.is_full:
                found = 0
                while found * retention.block_size < end:
                    if self._find(blocks, group, found) is None:
                        break
                    found += 1
                end = self._hit_end(blocks, min(end, found * retention.block_size))
        # A block missing inside one group's needed range bars every end behind it, since the range of
        # a smaller end begins no later. So each miss moves the end, until nobody misses anything.
        while (missing := self._last_missing(blocks, end)) is not None:
            end = self._hit_end(blocks, missing)
        tables = []
        for group, retention in enumerate(self.retentions):
            num_blocks = end // retention.block_size
            first = retention.first_block(end)
            kept = min(first, retention.num_kept(blocks.prefix_len))
            table = [NULL_BLOCK] * num_blocks
            for index in (*range(kept), *range(first, num_blocks)):
                block_id = self._find(blocks, group, index)
                assert block_id is not None
                table[index] = block_id
            tables.append(tuple(table))
        return PrefixHit(end, tuple(tables))

    def find_everything(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> PrefixHit:
        """Like `find_prefix`, but up to the last whole block, and with every block that is still there.

        Behind a window pages may be left that no query needs any more; they are in the tables too, as
        far as they go back without a gap.
        """
        # A token more, since the last one would stay out.
        hit = self.find_prefix(blocks, [*token_ids, -1])
        tables = []
        for group, (retention, table) in enumerate(zip(self.retentions, hit.tables, strict=True)):
            found = list(table)
            index = min(retention.first_block(hit.num_tokens), len(found)) - 1
            while index >= 0 and (block := self._find(blocks, group, index)) is not None:
                found[index] = block
                index -= 1
            tables.append(tuple(found))
        return PrefixHit(hit.num_tokens, tuple(tables))

    def take_from(
        self, blocks: RequestBlocks, first_blocks: Sequence[int], num_blocks: Sequence[int]
    ) -> None:
        """Allocate blocks of a prefix that comes from elsewhere. The tables must be empty.

        Args:
            first_blocks: per group, how many blocks at the beginning are not there.
            num_blocks: per group, blocks in all.

        Raises:
            OutOfPages: not enough blocks are free; nothing was changed.
        """
        assert not any(blocks.tables)
        absent = [min(first, n) for first, n in zip(first_blocks, num_blocks, strict=True)]
        ids = self.pool.allocate(sum(num_blocks) - sum(absent))
        for group, (first, n) in enumerate(zip(absent, num_blocks, strict=True)):
            blocks.tables[group] = [NULL_BLOCK] * first + ids[: n - first]
            del ids[: n - first]

    def take_prefix(self, blocks: RequestBlocks, hit: PrefixHit) -> None:
        """Hold the blocks of a hit just found. The tables must be empty."""
        assert not any(blocks.tables)
        self.pool.share(b for table in hit.tables for b in table if b != NULL_BLOCK)
        for group, table in enumerate(hit.tables):
            blocks.tables[group] = list(table)
            blocks._num_published[group] = len(table)

    def count_lookup(self, num_tokens: int, hit: PrefixHit) -> None:
        """Enter a lookup that a request was admitted with into the statistics."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += hit.num_tokens

    def same_prefix(self, a: RequestBlocks, b: RequestBlocks, num_tokens: int) -> bool:
        """Whether two requests begin with the same `num_tokens` tokens, as far as they were looked up.

        Args:
            num_tokens: a multiple of `hit_unit`.
        """
        size = self.retentions[0].block_size
        index = num_tokens // size
        ours, theirs = a._prefixes[size], b._prefixes[size]
        return index < min(len(ours), len(theirs)) and ours[index] is theirs[index]

    def num_missing(self, blocks: RequestBlocks, num_tokens: int) -> int:
        """Blocks to allocate before the request can hold `num_tokens` tokens."""
        return sum(
            max(0, r.num_blocks(num_tokens, blocks.encoder_len) - len(table))
            for r, table in zip(self.retentions, blocks.tables, strict=True)
        )

    def num_held(self, blocks: RequestBlocks) -> int:
        """Blocks the request holds, shared ones included."""
        return sum(b != NULL_BLOCK for table in blocks.tables for b in table)

    def grow(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Allocate what is missing for `num_tokens` tokens.

        Raises:
            OutOfPages: not enough blocks are free; nothing was changed.
        """
        new_ids = self.pool.allocate(self.num_missing(blocks, num_tokens))
        for retention, table in zip(self.retentions, blocks.tables, strict=True):
            wanted = max(0, retention.num_blocks(num_tokens, blocks.encoder_len) - len(table))
            table.extend(new_ids[:wanted])
            del new_ids[:wanted]

    def fork(self, blocks: RequestBlocks) -> RequestBlocks:
        """Another request with the same tokens so far, in the same blocks.

        Before either grows, `own_block` what it will write into.
        """
        copy = self.new_request(
            prefix_len=blocks.prefix_len, encoder_len=blocks.encoder_len, ranges=blocks.ranges
        )
        copy.tables = [list(table) for table in blocks.tables]
        copy._num_published = list(blocks._num_published)
        copy._prefixes = {size: list(prefixes) for size, prefixes in blocks._prefixes.items()}
        self.pool.share(b for table in copy.tables for b in table if b != NULL_BLOCK)
        return copy

    def own_block(self, blocks: RequestBlocks, position: int) -> list[tuple[int, int]]:
        """Replace the blocks of a position that other requests hold too.

        Returns:
            (old, new) ids: the contents are to be copied from one to the other.

        Raises:
            OutOfPages: not enough blocks are free; nothing was changed.
        """
        shared = [
            (table, index)
            for retention, table in zip(self.retentions, blocks.tables, strict=True)
            if (index := position // retention.block_size) < len(table)
            and table[index] != NULL_BLOCK
            and self.pool.num_refs(table[index]) > 1
        ]
        moves = []
        for (table, index), new in zip(shared, self.pool.allocate(len(shared)), strict=True):
            moves.append((table[index], new))
            table[index] = new
        self.pool.free([old for old, _ in moves])
        return moves

    def settle(self, blocks: RequestBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish full blocks, then give back those that no later query sees.

        Args:
            token_ids: all known tokens.
            num_computed: how many of them have their keys and values in the cache.
        """
        if self.pool.enable_prefix_caching:
            self._publish(blocks, token_ids, num_computed)
        gone = []
        for retention, table in zip(self.retentions, blocks.tables, strict=True):
            index = retention.first_block(num_computed) - 1
            num_kept = retention.num_kept(blocks.prefix_len)
            freed = []
            while index >= num_kept and table[index] != NULL_BLOCK:
                freed.append(table[index])
                table[index] = NULL_BLOCK
                index -= 1
            gone.extend(reversed(freed))
        if gone:
            self.pool.free(gone)

    def release(self, blocks: RequestBlocks) -> None:
        """Give back every block and forget the tokens. The tables are empty then."""
        longest = max(map(len, blocks.tables))
        # By position, so that the groups' ends are evicted together.
        held = [t[i] for i in range(longest) for t in blocks.tables if i < len(t)]
        for group in range(len(blocks.tables)):
            blocks.tables[group] = []
            blocks._num_published[group] = 0
        for prefixes in blocks._prefixes.values():
            del prefixes[1:]
        self.pool.free(held)

    def _publish(self, blocks: RequestBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        self._extend_prefixes(blocks, token_ids)
        for group, retention in enumerate(self.retentions):
            table = blocks.tables[group]
            num_full = self._num_shareable(blocks, num_computed) // retention.block_size
            for index in range(blocks._num_published[group], num_full):
                if table[index] != NULL_BLOCK:
                    self.pool.publish(table[index], self._key(blocks, group, index))
            blocks._num_published[group] = max(num_full, blocks._num_published[group])

    def _num_shareable(self, blocks: RequestBlocks, num_tokens: int) -> int:
        """Of the first `num_tokens` tokens those whose keys and values depend on what is before them
        alone: all, but where a prefix is kept those in it."""
        keeps = any(r.keeps_prefix for r in self.retentions)
        return min(num_tokens, blocks.prefix_len) if keeps else num_tokens

    def _extend_prefixes(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> None:
        for size, prefixes in blocks._prefixes.items():
            for start in range((len(prefixes) - 1) * size, len(token_ids) - size + 1, size):
                end = start + size
                keys = tuple(r for r in blocks.ranges if start <= r.first < end)
                prefixes.append(self._tree.extend(prefixes[-1], token_ids[start:end], keys))

    def _hit_end(self, blocks: RequestBlocks, num_tokens: int) -> int:
        """The last place up to `num_tokens` where a block of every group ends, and no range is cut."""
        end = num_tokens // self.hit_unit * self.hit_unit
        for cut in reversed(blocks.ranges):
            if cut.first < end <= cut.last:
                end = cut.first // self.hit_unit * self.hit_unit
        return end

    def _key(self, blocks: RequestBlocks, group: int, index: int) -> tuple[int, Prefix]:
        return group, blocks._prefixes[self.retentions[group].block_size][index + 1]

    def _find(self, blocks: RequestBlocks, group: int, index: int) -> int | None:
        return self.pool.find(self._key(blocks, group, index))

    def _last_missing(self, blocks: RequestBlocks, end: int) -> int | None:
        """First position of the last block that some group misses for a hit of `end` tokens."""
        for group, retention in enumerate(self.retentions):
            if retention.is_full:
                continue
            size = retention.block_size
            first = retention.first_block(end)
            kept = min(first, retention.num_kept(blocks.prefix_len))
            for index in (*range(end // size - 1, first - 1, -1), *range(kept - 1, -1, -1)):
                if self._find(blocks, group, index) is None:
                    return index * size
        return None
