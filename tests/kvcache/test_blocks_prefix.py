"""Laws of prefixes and block tables: equal prefixes are one object, and hits are what is needed."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit.errors import ConfigurationError, OutOfPages
from attnkit.kvcache.blocks import NULL_BLOCK, BlockPool
from attnkit.kvcache.prefix import PrefixTree
from attnkit.kvcache.retention import Retention
from attnkit.kvcache.tables import BlockManager, RequestBlocks, TokenRange

FULL = Retention(block_size=4)
WINDOW = Retention(block_size=4, sliding_window=8)


def make_manager(num_blocks: int, *retentions: Retention) -> BlockManager:
    return BlockManager(BlockPool(num_blocks), retentions)


def compute(
    manager: BlockManager, token_ids: list[int], chunk: int = 5, prefix_len: int = 0
) -> RequestBlocks:
    """Run a prompt through the tables as a scheduler would; the caller releases."""
    blocks = manager.new_request(prefix_len=prefix_len)
    hit = manager.find_prefix(blocks, token_ids)
    manager.take_prefix(blocks, hit)
    done = hit.num_tokens
    while done < len(token_ids):
        done = min(len(token_ids), done + chunk)
        manager.grow(blocks, done)
        manager.settle(blocks, token_ids, done)
    return blocks


def find(manager: BlockManager, token_ids: list[int], extra_keys: tuple = ()) -> int:
    return manager.find_prefix(manager.new_request(extra_keys), token_ids).num_tokens


def test_equal_prefixes_are_identical_and_others_are_not():
    tree = PrefixTree()
    root = tree.root()
    a = tree.extend(tree.extend(root, [1, 2]), [3, 4])
    assert tree.extend(tree.extend(tree.root(), (1, 2)), (3, 4)) is a
    others = [
        tree.extend(root, [3, 4]),
        tree.extend(tree.extend(root, [2, 1]), [3, 4]),
        tree.extend(tree.extend(root, [1, 2]), [3, 5]),
        tree.extend(tree.extend(tree.root(("salt",)), [1, 2]), [3, 4]),
        tree.extend(root, [1, 2, 3, 4]),
    ]
    assert len({id(p) for p in [a, *others]}) == 6


def test_tokens_that_hash_alike_are_different_prefixes():
    # CPython: hash(-1) == hash(-2), so these tuples hash alike.
    assert hash((-1, 5)) == hash((-2, 5))
    tree = PrefixTree()
    assert tree.extend(tree.root(), [-1, 5]) is not tree.extend(tree.root(), [-2, 5])


def test_prefixes_nobody_refers_to_are_forgotten_however_long_the_chain():
    tree = PrefixTree()
    last = tree.root()
    for i in range(100_000):
        last = tree.extend(last, [i])
    assert len(tree) == 100_001
    del last
    gc.collect()
    assert len(tree) == 0


def test_prefixes_live_as_long_as_a_block_is_cached_under_them():
    manager = make_manager(4, FULL)
    manager.release(compute(manager, list(range(12))))
    assert len(manager._tree) == 4
    manager.pool.allocate(3)
    assert len(manager._tree) == 0


def test_released_tables_refer_to_no_prefix_and_can_be_filled_again():
    manager = make_manager(4, FULL)
    blocks = compute(manager, list(range(12)))
    manager.release(blocks)
    manager.pool.free(manager.pool.allocate(3))
    assert len(manager._tree) == 1
    other = list(range(50, 62))
    manager.grow(blocks, 12)
    manager.settle(blocks, other, 12)
    assert find(manager, [*other, 0]) == 12
    assert find(manager, list(range(12))) == 0


@pytest.mark.parametrize(
    ("num_tokens", "found"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (30, 12)]
)
def test_only_full_blocks_are_found_and_the_last_token_never(num_tokens, found):
    manager = make_manager(20, FULL)
    manager.release(compute(manager, list(range(14))))
    assert find(manager, list(range(num_tokens))) == found


def test_extra_keys_keep_equal_tokens_apart():
    manager = make_manager(20, FULL)
    blocks = manager.new_request(("adapter", 1))
    token_ids = list(range(9))
    manager.grow(blocks, 9)
    manager.settle(blocks, token_ids, 9)
    assert find(manager, token_ids) == 0
    assert find(manager, token_ids, ("adapter", 2)) == 0
    assert find(manager, token_ids, ("adapter", 1)) == 8


def test_evicted_prompt_is_a_miss_and_a_changed_token_ends_the_hit():
    manager = make_manager(5, FULL)
    x, y = list(range(16)), list(range(100, 116))
    manager.release(compute(manager, x))
    assert find(manager, x) == 12
    manager.release(compute(manager, y))
    assert find(manager, x) == 0
    manager.release(compute(manager, x))
    assert find(manager, [99, *x[1:]]) == 0
    assert find(manager, [*x[:5], 99, *x[6:]]) == 4


def test_two_holders_share_full_blocks_but_not_the_one_being_written():
    manager = make_manager(20, FULL)
    token_ids = list(range(10))
    a = compute(manager, token_ids)
    b = compute(manager, token_ids)
    assert a.tables[0][:2] == b.tables[0][:2]
    assert a.tables[0][2] != b.tables[0][2]
    assert [manager.pool.num_refs(i) for i in a.tables[0]] == [2, 2, 1]
    manager.release(a)
    manager.release(b)
    assert manager.pool.num_used == 0


def test_blocks_left_of_the_window_become_null_and_are_free_again():
    manager = make_manager(20, WINDOW)
    blocks = compute(manager, list(range(19)), chunk=19)
    # The next query, at 19, sees 12 to 19: blocks 0 to 2 are gone, block 3 stays.
    assert blocks.tables[0][:3] == [NULL_BLOCK] * 3
    assert NULL_BLOCK not in blocks.tables[0][3:]
    assert manager.pool.num_used == 2
    assert manager.num_held(blocks) == 2


def test_blocks_of_an_earlier_chunk_become_null():
    manager = make_manager(20, Retention(block_size=4, attention_chunk_size=8))
    assert [b == 0 for b in compute(manager, list(range(15))).tables[0]] == [
        True,
        True,
        False,
        False,
    ]
    assert [b == 0 for b in compute(manager, list(range(50, 66))).tables[0]] == [True] * 4


def test_a_window_group_needs_only_its_last_window_for_a_hit():
    manager = make_manager(20, FULL, WINDOW)
    token_ids = list(range(25))
    manager.release(compute(manager, token_ids))
    blocks = manager.new_request()
    hit = manager.find_prefix(blocks, token_ids)
    # Position 24 sees 17 to 24 through the window: blocks 4 and 5.
    assert hit.num_tokens == 24
    assert [b == NULL_BLOCK for b in hit.tables[1]] == [True] * 4 + [False] * 2
    assert NULL_BLOCK not in hit.tables[0]


def test_a_hit_ends_where_the_smallest_window_still_has_everything():
    """A prefix whose window pages were overwritten must not be reused, whatever the full group has."""
    manager = make_manager(24, FULL, WINDOW)
    token_ids = list(range(32))
    manager.release(compute(manager, token_ids))
    full, window = ({g: b for (g, _), b in manager.pool._by_key.items()} for g in (0, 1))
    assert full
    assert window
    # Evict the window group's blocks 5 and 6, in the middle of what a hit of 28 needs.
    chain = manager.new_request()
    manager.find_prefix(chain, token_ids)
    for index in (5, 6):
        evict(manager.pool, manager._key(chain, 1, index))
    # 28 needs window blocks 5, 6; 24 needs 4, 5; 20 needs 3, 4.
    assert find(manager, token_ids) == 20


def evict(pool: BlockPool, key: object) -> None:
    """Evict one idle block by making it the oldest and holding all blank ones meanwhile."""
    block_id = pool.find(key)
    assert block_id is not None
    pool._idle.move_to_end(block_id, last=False)
    others = pool.allocate(len(pool._blank))
    assert pool.allocate(1) == [block_id]
    pool.free([*others, block_id])


def brute_force_hit(manager: BlockManager, blocks: RequestBlocks, token_ids: list[int]) -> int:
    """Largest end for which each group has all blocks that a later query sees, by definition."""
    for end in range(len(token_ids) - 1, 0, -1):
        if any(end % r.block_size for r in manager.retentions):
            continue
        if end > blocks.prefix_len and any(r.keeps_prefix for r in manager.retentions):
            continue  # What is behind a kept prefix depends on its length.
        if all(
            manager.pool.find(manager._key(blocks, g, key // r.block_size)) is not None
            for g, r in enumerate(manager.retentions)
            for key in range(end)
            if is_visible_later(r, key, end, blocks.prefix_len)
        ):
            return end
    return 0


def is_visible_later(retention: Retention, key: int, position: int, prefix_len: int) -> bool:
    if retention.keeps_prefix and key < prefix_len:
        return True
    if retention.sliding_window is not None:
        return position - key < retention.sliding_window
    if retention.attention_chunk_size is not None:
        size = retention.attention_chunk_size
        return position // size == key // size
    return True


RETENTION = st.one_of(
    st.builds(Retention, block_size=st.sampled_from([2, 4, 8])),
    st.builds(Retention, block_size=st.sampled_from([2, 4]), sliding_window=st.integers(1, 13)),
    st.builds(
        Retention, block_size=st.sampled_from([2, 4]), attention_chunk_size=st.integers(1, 12)
    ),
    st.builds(
        Retention,
        block_size=st.sampled_from([2, 4]),
        sliding_window=st.integers(1, 9),
        keeps_prefix=st.just(True),
    ),
)


@settings(max_examples=200, deadline=None)
@given(
    retentions=st.lists(RETENTION, min_size=1, max_size=3),
    num_tokens=st.integers(1, 40),
    prefix_len=st.integers(0, 40),
    seed=st.integers(0, 10**6),
)
def test_hits_are_the_longest_that_every_group_can_serve(retentions, num_tokens, prefix_len, seed):
    rng = random.Random(seed)
    manager = make_manager(200, *retentions)
    token_ids = [rng.randrange(50) for _ in range(num_tokens)]
    manager.release(compute(manager, token_ids, rng.randint(1, 9), prefix_len))
    for key in list(manager.pool._by_key):
        if rng.random() < 0.15:
            evict(manager.pool, key)
    blocks = manager.new_request(prefix_len=prefix_len)
    hit = manager.find_prefix(blocks, token_ids)
    assert hit.num_tokens == brute_force_hit(manager, blocks, token_ids)
    for r, table in zip(retentions, hit.tables, strict=True):
        assert len(table) * r.block_size == hit.num_tokens
        for key in range(hit.num_tokens):
            if is_visible_later(r, key, hit.num_tokens, prefix_len):
                assert table[key // r.block_size] != NULL_BLOCK
    manager.take_prefix(blocks, hit)
    manager.release(blocks)
    assert manager.pool.num_used == 0


@settings(max_examples=100, deadline=None)
@given(
    retention=RETENTION,
    num_tokens=st.integers(1, 60),
    prefix_len=st.integers(0, 60),
    seed=st.integers(0, 10**6),
)
def test_pages_are_held_while_they_are_seen_and_no_longer(retention, num_tokens, prefix_len, seed):
    rng = random.Random(seed)
    manager = make_manager(200, retention)
    blocks, done, token_ids = manager.new_request(prefix_len=prefix_len), 0, list(range(num_tokens))
    while done < num_tokens:
        done = min(num_tokens, done + rng.randint(1, 20))
        manager.grow(blocks, done)
        manager.settle(blocks, token_ids, done)
        size = retention.block_size
        for index, block_id in enumerate(blocks.tables[0]):
            keys = range(index * size, (index + 1) * size)
            seen = any(is_visible_later(retention, key, done, prefix_len) for key in keys)
            # The block of the next token is held, whether one of the present ones is seen or not.
            assert (block_id != NULL_BLOCK) == (seen or done in keys), index
    manager.release(blocks)
    assert manager.pool.num_used == 0


def test_nothing_behind_a_kept_prefix_is_shared():
    """There, keys and values depend on how long the prefix is: a longer prompt sees more."""
    manager = make_manager(50, FULL, Retention(block_size=4, sliding_window=4, keeps_prefix=True))
    token_ids = list(range(24))
    manager.release(compute(manager, token_ids, prefix_len=14))
    blocks = manager.new_request(prefix_len=24)
    assert manager.find_prefix(blocks, [*token_ids, 99]).num_tokens == 12
    blocks = manager.new_request(prefix_len=9)
    assert manager.find_prefix(blocks, [*token_ids, 99]).num_tokens == 8


@settings(max_examples=200, deadline=None)
@given(
    retention=RETENTION,
    num_tokens=st.integers(1, 60),
    max_query_len=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_max_blocks_bounds_every_schedule(retention, num_tokens, max_query_len, seed):
    rng = random.Random(seed)
    manager = make_manager(200, retention)
    bound = manager.max_blocks(num_tokens, max_query_len)
    blocks, done, token_ids = manager.new_request(), 0, list(range(num_tokens))
    while done < num_tokens:
        done = min(num_tokens, done + rng.randint(1, max_query_len))
        manager.grow(blocks, done)
        assert manager.num_held(blocks) <= bound
        manager.settle(blocks, token_ids, done)
    manager.release(blocks)


@pytest.mark.parametrize(
    ("retention", "num_tokens", "max_query_len", "blocks"),
    [
        (FULL, 17, 3, 5),
        (WINDOW, 100, 1, 3),  # 8 tokens from the last of a block on
        (WINDOW, 100, 2, 3),
        (WINDOW, 100, 3, 4),
        (WINDOW, 9, 3, 3),
        (Retention(block_size=4, sliding_window=1), 100, 1, 1),
        (Retention(block_size=4, attention_chunk_size=8), 100, 1, 2),
        (Retention(block_size=4, attention_chunk_size=6), 100, 1, 2),
        (Retention(block_size=4, attention_chunk_size=7), 100, 1, 3),
    ],
)
def test_max_blocks_is_reached(retention, num_tokens, max_query_len, blocks):
    manager = make_manager(200, retention)
    assert manager.max_blocks(num_tokens, max_query_len) == blocks
    most = 0
    for start in range(max_query_len):
        tables, done, token_ids = manager.new_request(), 0, list(range(num_tokens))
        while done < num_tokens:
            done = min(num_tokens, done + (start or max_query_len if done == 0 else max_query_len))
            manager.grow(tables, done)
            most = max(most, manager.num_held(tables))
            manager.settle(tables, token_ids, done)
        manager.release(tables)
    assert most == blocks


def test_grow_is_all_or_nothing_over_groups():
    manager = make_manager(4, FULL, WINDOW)
    blocks = manager.new_request()
    manager.grow(blocks, 4)
    with pytest.raises(OutOfPages):
        manager.grow(blocks, 8)
    assert [len(t) for t in blocks.tables] == [1, 1]
    assert manager.pool.num_free == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"block_size": 4, "sliding_window": 0},
        {"block_size": 4, "attention_chunk_size": -1},
        {"block_size": 4, "sliding_window": 3, "attention_chunk_size": 3},
        {"block_size": 4, "keeps_prefix": True},
    ],
)
def test_impossible_retentions_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Retention(**wrong)


def test_a_manager_without_groups_is_refused():
    with pytest.raises(ConfigurationError, match="at least one group"):
        make_manager(4)


def test_pages_of_a_range_are_shared_where_the_whole_range_is_the_same():
    """Tokens 6 to 13 see each other: what page 1 holds depends on the range's last token too, and on
    the image. Hits end before a range they would cut."""
    manager = make_manager(20, FULL, WINDOW)
    token_ids = list(range(20))
    cat, dog = TokenRange(6, 13, "cat"), TokenRange(6, 13, "dog")
    blocks = manager.new_request(ranges=(cat,))
    manager.grow(blocks, 20)
    manager.settle(blocks, token_ids, 20)

    def found(num_tokens: int, *ranges: TokenRange) -> int:
        return manager.find_prefix(
            manager.new_request(ranges=ranges), token_ids[:num_tokens]
        ).num_tokens

    assert found(20, cat) == 16
    assert found(16, cat) == 4, "12 would be inside the range"
    assert found(20, dog) == found(20) == found(20, TokenRange(6, 12, "cat")) == 4
    assert found(20, TokenRange(3, 13, "cat")) == 0
    # Behind another range that ends where this one begins, the next smaller place is inside of it.
    assert found(20, TokenRange(2, 5, "x"), cat) == 0
