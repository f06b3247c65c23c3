"""BlockPool: which block ids are free, used, shared, and findable by what they hold.

In: counts to allocate, ids to share and free, and keys under which a full block can be found again.
Out: block ids. Nothing here holds memory or knows tokens; `prefix` makes the keys, `tables` keeps the
ids of one request, `pool.PagedKVCache` is the memory.

A block is used (referenced), blank (free, nothing findable in it) or idle (free, but still findable
until it is evicted, least recently used first). Block 0 is the null block and never handed out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from attnkit.errors import CacheError, OutOfPages

NULL_BLOCK = 0
"""The block that stands where no page is: never written, never read unmasked."""


class BlockPool:
    """Reference-counted block ids with a least-recently-used cache over the free ones.

    Attributes:
        num_blocks: all blocks, the null block included.
        enable_prefix_caching: False: `publish` does nothing and `find` never finds.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        """Start with every block blank.

        Raises:
            CacheError: fewer than 2 blocks.
        """
        if num_blocks < 2:
            raise CacheError(
                f"{num_blocks} blocks leave no page beside the null block; give at least 2"
            )
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._num_refs = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_key: dict[Hashable, int] = {}
        self._poisonable: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, idle ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that `find` can find, used or idle."""
        return len(self._by_key)

    def num_refs(self, block_id: int) -> int:
        """How often a block is held."""
        self._check_own(block_id)
        return self._num_refs[block_id]

    def allocate(self, num_wanted: int) -> list[int]:
        """Take blocks, all or none. Blank ones go first, then idle ones are evicted.

        Contents are whatever was there: see `take_poisonable`.

        Raises:
            OutOfPages: not enough are free; nothing was taken.
        """
        assert num_wanted >= 0, num_wanted
        if num_wanted > self.num_free:
            raise OutOfPages(
                f"{num_wanted} blocks were asked for but {self.num_free} of {self.num_blocks - 1} "
                "are free; free some, ask for fewer, or give the cache more memory"
            )
        taken = []
        for _ in range(num_wanted):
            block_id = self._blank.pop() if self._blank else self._evict()
            self._num_refs[block_id] = 1
            taken.append(block_id)
        return taken

    def extend(self, num_blocks: int) -> None:
        """Let the pool grow to `num_blocks`, the null block included; the new ones are blank.

        Raises:
            CacheError: that is fewer than there are.
        """
        if num_blocks < self.num_blocks:
            raise CacheError(
                f"a pool of {self.num_blocks} blocks cannot shrink to {num_blocks}; give more"
            )
        more = range(self.num_blocks, num_blocks)
        self._num_refs += [0] * len(more)
        self._keys += [None] * len(more)
        self._blank[:0] = reversed(more)  # Taken last.
        self.num_blocks = num_blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more: used ones, or idle ones just found.

        Raises:
            CacheError: an id is not of this pool, or its block is blank; nothing was changed.
        """
        ids = list(block_ids)
        for block_id in ids:
            self._check_own(block_id)
            if self._num_refs[block_id] == 0 and block_id not in self._idle:
                raise CacheError(
                    f"block {block_id} is free and holds nothing to share; allocate it instead"
                )
        for block_id in ids:
            self._idle.pop(block_id, None)
            self._num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block; null blocks are passed over.

        Ids come in the order of the tokens they hold. They are freed from the last to the first, so
        that the end of a prefix is evicted before its beginning: a beginning alone is still useful.

        Raises:
            CacheError: an id is not of this pool or freed more often than held; nothing was changed.
        """
        ids = [b for b in block_ids if b != NULL_BLOCK]
        for block_id, times in Counter(ids).items():
            self._check_own(block_id)
            if times > self._num_refs[block_id]:
                raise CacheError(
                    f"block {block_id} is freed {times} times but held {self._num_refs[block_id]} "
                    "times; free a block once for each allocate or share"
                )
        for block_id in reversed(ids):
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id]:
                continue
            if self._keys[block_id] is not None:
                self._idle[block_id] = None
            else:
                self._blank.append(block_id)
                self._poisonable.add(block_id)

    def publish(self, block_id: int, key: Hashable) -> None:
        """Make a full, held block findable. The first block published under a key keeps it.

        Args:
            key: says everything the contents depend on. Keys are compared by equality, so two that
                only hash alike are never taken for one another.

        Raises:
            CacheError: the id is not of this pool, or nobody holds the block.
        """
        self._check_own(block_id)
        if self._num_refs[block_id] == 0:
            raise CacheError(f"block {block_id} is free; publish it while it is held")
        if not self.enable_prefix_caching or self._keys[block_id] is not None:
            return
        if self._by_key.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def find(self, key: Hashable) -> int | None:
        """The block published under a key, or None. `share` it before anything else is allocated."""
        return self._by_key.get(key)

    def take_poisonable(self) -> list[int]:
        """Ids whose contents became garbage since the last call, in ascending order.

        They were freed without being findable, or evicted; some may be allocated again by now. Whoever
        owns the memory may overwrite them, after blocks for a step were allocated and before the step
        writes.
        """
        ids = sorted(self._poisonable)
        self._poisonable.clear()
        return ids

    def _evict(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        key = self._keys[block_id]
        assert key is not None
        del self._by_key[key]
        self._keys[block_id] = None
        self._poisonable.add(block_id)
        return block_id

    def _check_own(self, block_id: int) -> None:
        if not NULL_BLOCK < block_id < self.num_blocks:
            raise CacheError(
                f"block {block_id} is not of this pool, whose blocks are 1 to {self.num_blocks - 1}"
            )
