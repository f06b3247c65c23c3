"""Laws of the block pool: nothing is given twice, holds are conserved, what is findable is true."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attnkit.errors import CacheError, OutOfPages
from attnkit.kvcache.blocks import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list of holds and a dictionary of what each block was published for."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.holds: list[int] = []  # one entry a hold
        self.contents: dict[int, int] = {}  # block -> key it was published under
        self.idle: list[int] = []  # oldest first

    @rule(num=st.integers(0, 8))
    def allocate(self, num: int) -> None:
        num_free = self.NUM_BLOCKS - 1 - len(set(self.holds))
        if num > num_free:
            with pytest.raises(OutOfPages, match=rf"{num} blocks.*{num_free} of 6"):
                self.pool.allocate(num)
            return
        num_blank = num_free - len(self.idle)
        evicted, self.idle = (
            self.idle[: max(0, num - num_blank)],
            self.idle[max(0, num - num_blank) :],
        )
        for block_id in evicted:
            del self.contents[block_id]
        ids = self.pool.allocate(num)
        assert len(set(ids)) == num
        assert NULL_BLOCK not in ids
        assert not set(ids) & set(self.holds)
        assert set(evicted) <= set(ids)
        self.holds.extend(ids)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.holds))
        self.pool.share([block_id])
        self.holds.append(block_id)

    @rule(key=st.integers(0, 3))
    def share_found(self, key: int) -> None:
        block_id = self.pool.find(key)
        if block_id is not None:
            self.pool.share([block_id])
            self.holds.append(block_id)
            self.idle = [b for b in self.idle if b != block_id]

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(range(len(self.holds))), unique=True, max_size=4))
        freed = [self.holds[i] for i in ids]
        self.holds = [b for i, b in enumerate(self.holds) if i not in ids]
        self.pool.free(freed)
        # One given twice is freed where it comes first.
        for block_id in reversed(dict.fromkeys(freed)):
            is_idle = block_id not in self.holds and block_id in self.contents
            if is_idle and block_id not in self.idle:
                self.idle.append(block_id)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), key=st.integers(0, 3))
    def publish(self, data: st.DataObject, key: int) -> None:
        block_id = data.draw(st.sampled_from(self.holds))
        self.pool.publish(block_id, key)
        if block_id not in self.contents and key not in self.contents.values():
            self.contents[block_id] = key

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_used == len(set(self.holds))
        assert self.pool.num_used + self.pool.num_free == self.NUM_BLOCKS - 1
        assert self.pool.num_cached == len(self.contents)
        for block_id in range(1, self.NUM_BLOCKS):
            assert self.pool.num_refs(block_id) == self.holds.count(block_id)
        for key in range(4):
            found = self.pool.find(key)
            assert found == next((b for b, k in self.contents.items() if k == key), None)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_pool_agrees_with_a_list_of_holds = PoolMachine.TestCase


def test_out_of_pages_names_wanted_free_and_total_and_takes_nothing():
    pool = BlockPool(6)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="4 blocks were asked for but 3 of 5 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_page_is_refused(num_blocks):
    with pytest.raises(CacheError, match=f"{num_blocks} blocks"):
        BlockPool(num_blocks)


def test_double_free_raises_and_changes_nothing():
    pool = BlockPool(6)
    a, b = pool.allocate(2)
    pool.free([a])
    with pytest.raises(CacheError, match=f"block {a} is freed 1 times but held 0"):
        pool.free([b, a])
    with pytest.raises(CacheError, match=f"block {b} is freed 2 times but held 1"):
        pool.free([b, b])
    assert pool.num_refs(b) == 1
    assert pool.num_used == 1


@pytest.mark.parametrize("foreign", [-1, 6, 10**6])
def test_foreign_ids_raise_and_change_nothing(foreign):
    pool = BlockPool(6)
    (own,) = pool.allocate(1)
    for call in (pool.free, pool.share):
        with pytest.raises(CacheError, match=rf"block {foreign} is not of this pool.*1 to 5"):
            call([own, foreign])
    with pytest.raises(CacheError, match="not of this pool"):
        pool.publish(foreign, "key")
    assert pool.num_refs(own) == 1


def test_the_null_block_is_passed_over_by_free_and_not_shared():
    pool = BlockPool(4)
    ids = pool.allocate(3)
    pool.free([NULL_BLOCK, ids[0], NULL_BLOCK, *ids[1:]])
    assert pool.num_used == 0
    with pytest.raises(CacheError, match="block 0"):
        pool.share([NULL_BLOCK])


def test_a_blank_block_cannot_be_shared_or_published():
    pool = BlockPool(4)
    ids = pool.allocate(1)
    pool.free(ids)
    with pytest.raises(CacheError, match="holds nothing to share"):
        pool.share(ids)
    with pytest.raises(CacheError, match="publish it while it is held"):
        pool.publish(ids[0], "key")


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    pool = BlockPool(6)
    first = pool.allocate(2)
    second = pool.allocate(3)
    for ids, name in ((first, "first"), (second, "second")):
        for index, block_id in enumerate(ids):
            pool.publish(block_id, (name, index))
    pool.free(second)
    pool.free(first)
    gone = []
    for _ in range(5):
        pool.allocate(1)
        keys = [("first", 0), ("first", 1), ("second", 0), ("second", 1), ("second", 2)]
        gone.extend(k for k in keys if pool.find(k) is None and k not in gone)
    assert gone == [("second", 2), ("second", 1), ("second", 0), ("first", 1), ("first", 0)]


def test_blank_blocks_are_used_before_anything_is_evicted():
    pool = BlockPool(5)
    cached, blank = pool.allocate(2)
    pool.publish(cached, "key")
    pool.free([cached])
    pool.free([blank])
    pool.allocate(3)
    assert pool.find("key") == cached
    pool.allocate(1)
    assert pool.find("key") is None


def test_an_evicted_block_loses_its_old_identity():
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, "old")
    pool.free([block_id])
    assert pool.allocate(1) == [block_id]
    assert pool.find("old") is None
    pool.publish(block_id, "new")
    assert (pool.find("old"), pool.find("new")) == (None, block_id)


def test_keys_that_only_hash_alike_are_different():
    class Key:
        def __init__(self, name: str) -> None:
            self.name = name

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Key) and other.name == self.name

    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.publish(a, Key("a"))
    assert pool.find(Key("b")) is None
    pool.publish(b, Key("b"))
    assert pool.find(Key("a")) == a
    assert pool.find(Key("b")) == b


def test_poisonable_are_exactly_blocks_freed_blank_or_evicted():
    pool = BlockPool(4)
    ids = pool.allocate(3)
    assert pool.take_poisonable() == []
    pool.publish(ids[0], "key")
    pool.free(ids)
    assert pool.take_poisonable() == sorted(ids[1:])
    assert pool.take_poisonable() == []
    pool.allocate(2)
    assert pool.take_poisonable() == []
    pool.allocate(1)
    assert pool.take_poisonable() == [ids[0]]


def test_without_prefix_caching_nothing_is_findable():
    pool = BlockPool(4, enable_prefix_caching=False)
    ids = pool.allocate(1)
    pool.publish(ids[0], "key")
    assert pool.find("key") is None
    pool.free(ids)
    assert pool.take_poisonable() == ids
