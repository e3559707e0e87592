import pytest

from engine.cache import BlockManager, Cleared, Removed, Stored, blocks, hash_chain, root_hash
from engine.config import CacheConfig

COMMON = tuple(range(100, 148))  # three blocks of 16


def make_blocks(num_blocks=11, block_tokens=16, **config):
    return BlockManager(
        CacheConfig(num_blocks=num_blocks, block_tokens=block_tokens, **config), "weights"
    )


def prefill(manager, request_id, token_ids, salt=""):
    """Allocate for a whole prompt and compute all of it."""
    num_cached = manager.allocate(request_id, token_ids, salt, len(token_ids))
    assert num_cached is not None
    manager.commit(request_id, token_ids, len(token_ids))
    return num_cached


def drain(manager):
    """Every free block, in the order in which it would be handed out."""
    manager.allocate("drain", (), "", manager.num_free_blocks * manager.config.block_tokens)
    return manager.table("drain")


def test_blocks_are_handed_out_in_order_and_block_0_never():
    m = make_blocks(num_blocks=5)
    assert m.allocate("a", COMMON[:20], "", 20) == 0
    assert m.table("a") == (1, 2)
    assert m.extend("a", 64)
    assert m.table("a") == (1, 2, 3, 4)
    assert (m.num_free_blocks, m.num_held_blocks) == (0, 4)
    assert not m.extend("a", 65)
    assert m.table("a") == (1, 2, 3, 4)
    m.check()


def test_a_prefix_is_shared_and_outlives_its_suffixes():
    m = make_blocks()
    assert prefill(m, "a", (*COMMON, *range(7))) == 0
    assert m.table("a") == (1, 2, 3, 4)
    assert prefill(m, "b", (*COMMON, *range(50, 55))) == 48
    assert m.table("b") == (1, 2, 3, 5)
    m.free("a")
    m.free("b")
    m.check()
    # Partial blocks first, then untouched ones, then the prefix from its tail.
    assert drain(m) == (5, 4, 6, 7, 8, 9, 10, 3, 2, 1)


def test_a_shared_block_is_no_longer_evictable():
    m = make_blocks(num_blocks=6)
    prefill(m, "a", COMMON)
    m.free("a")
    assert m.allocate("b", COMMON[:40], "", 40) == 32
    assert m.table("b") == (1, 2, 4)
    assert drain(m) == (5, 3)
    m.check()


def test_the_least_recently_used_prefix_is_evicted_first():
    m = make_blocks(num_blocks=7, block_tokens=4)
    prefill(m, "old", tuple(range(12)))
    prefill(m, "new", tuple(range(50, 62)))
    m.free("old")
    m.free("new")
    prefill(m, "old again", tuple(range(12)))  # touches blocks 1 and 2, recomputes the third
    assert m.table("old again") == (1, 2, 3)
    m.free("old again")
    m.check()
    assert drain(m) == (6, 5, 4, 3, 2, 1)


def test_one_token_is_always_left_to_compute():
    m = make_blocks()
    prefill(m, "a", COMMON)
    assert m.match(COMMON, "") == 32
    assert m.match((*COMMON, 1), "") == 48
    assert m.match(COMMON[:1], "") == 0
    assert m.match((), "") == 0


def test_a_block_is_shared_only_once_it_is_computed():
    m = make_blocks()
    m.allocate("a", COMMON, "", 48)
    assert m.match(COMMON, "") == 0
    m.commit("a", COMMON, 31)
    assert m.match(COMMON, "") == 16
    m.commit("a", COMMON, 32)
    assert m.match(COMMON, "") == 32
    m.check()


def test_committing_reads_only_the_new_blocks():
    class Watched(list):
        def __getitem__(self, key):
            read.append((key.start, key.stop))
            return super().__getitem__(key)

    read = []
    m = make_blocks(block_tokens=4)
    tokens = Watched(range(40))
    m.allocate("a", tuple(tokens), "", 40)
    m.commit("a", tokens, 10)
    assert read == [(0, 4), (4, 8)]
    read.clear()
    m.commit("a", tokens, 11)
    assert read == []
    m.commit("a", tokens, 12)
    assert read == [(8, 12)]


def test_tenants_with_different_salts_never_share():
    m = make_blocks()
    prefill(m, "a", COMMON, salt="one")
    assert m.match((*COMMON, 1), "two") == 0
    assert m.match((*COMMON, 1), "") == 0
    assert prefill(m, "b", COMMON, salt="two") == 0
    assert not set(m.table("a")) & set(m.table("b"))
    m.check()


def test_no_room_changes_nothing():
    m = make_blocks(num_blocks=5)
    prefill(m, "a", COMMON)
    m.free("a")
    before = m.num_query_tokens
    # Its three cached blocks are idle: they are used by the request, not room for it.
    assert m.allocate("b", (*COMMON, *range(17)), "", 65) is None
    assert m.num_query_tokens == before
    assert m.num_held_blocks == 0
    m.check()
    assert m.allocate("b", (*COMMON, *range(16)), "", 64) == 48
    assert m.table("b") == (1, 2, 3, 4)


def test_a_request_sharing_held_blocks_needs_room_only_for_the_rest():
    m = make_blocks(num_blocks=5)
    prefill(m, "a", COMMON)
    assert m.allocate("b", (*COMMON, 1), "", 49) == 48
    assert m.table("b") == (1, 2, 3, 4)
    assert m.num_free_blocks == 0
    m.check()


def test_fits_counts_blocks_that_only_the_freed_requests_hold():
    m = make_blocks(num_blocks=5, block_tokens=4)
    prefill(m, "a", (1, 2, 3, 4, 5))
    prefill(m, "b", (1, 2, 3, 4, 6))
    assert m.num_free_blocks == 1
    other = tuple(range(20, 32))
    assert m.fits(other[:4], "", 4)
    assert not m.fits(other[:8], "", 8)
    assert m.fits(other[:8], "", 8, freeing=["b"])  # block 1 is still held by a
    assert not m.fits(other, "", 12, freeing=["b"])
    assert m.fits(other, "", 12, freeing=["a", "b"])
    # What it shares with them is not also room: blocks 1, then three new ones.
    assert m.fits((1, 2, 3, 4, *other), "", 16, freeing=["a", "b"])
    assert not m.fits((1, 2, 3, 4, *other), "", 17, freeing=["a", "b"])


def test_equal_blocks_are_kept_as_they_are_and_serve_until_the_last_is_gone():
    m = make_blocks(num_blocks=5, block_tokens=4)
    tokens = (1, 2, 3, 4)
    m.allocate("a", tokens, "", 4)
    m.allocate("b", tokens, "", 4)
    m.commit("a", tokens, 4)
    m.commit("b", tokens, 4)
    assert (m.table("a"), m.table("b")) == ((1,), (2,))
    [stored] = m.drain_events()
    m.free("a")
    assert m.allocate("c", (9,), "", 12) == 0
    assert m.table("c") == (3, 4, 1)  # one of the two was evicted
    assert m.drain_events() == []
    m.check()
    assert m.match((*tokens, 5), "") == 4
    m.free("b")
    m.free("c")
    drain(m)
    assert m.drain_events() == [Removed(stored.block_hash)]
    assert m.match((*tokens, 5), "") == 0
    m.check()


def test_a_table_is_the_same_object_until_it_grows():
    m = make_blocks()
    m.allocate("a", COMMON, "", 48)
    table = m.table("a")
    m.extend("a", 48)
    m.commit("a", COMMON, 48)
    assert m.table("a") is table
    m.extend("a", 49)
    assert m.table("a") == (*table, 4)
    assert table == (1, 2, 3)


def test_a_lease_holds_the_blocks_after_the_request_is_gone():
    m = make_blocks(num_blocks=5)
    prefill(m, "a", COMMON[:40])
    m.lease("L", "a", deadline=30.0)
    m.extend("a", 49)
    m.free("a")
    assert m.num_held_blocks == 3
    assert m.leased_table("L") == (1, 2, 3)
    assert m.num_leases == 1
    m.check()
    assert m.release("L")
    assert not m.release("L")
    assert m.leased_table("L") is None
    assert (m.num_held_blocks, m.num_leases) == (0, 0)
    assert m.match(COMMON, "") == 32
    m.check()


def test_a_lease_ends_at_its_deadline_unless_renewed():
    m = make_blocks()
    prefill(m, "a", COMMON)
    m.lease("x", "a", deadline=30.0)
    m.lease("y", "a", deadline=30.0)
    m.free("a")
    assert m.expire(29.9) == []
    assert m.renew("y", 60.0)
    assert m.expire(30.0) == ["x"]
    assert not m.renew("x", 60.0)
    assert m.num_held_blocks == 3
    assert m.expire(60.0) == ["y"]
    assert m.num_held_blocks == 0
    m.check()


def test_events_say_what_can_be_shared_now():
    m = make_blocks(num_blocks=4, block_tokens=4)
    root = root_hash("weights", "t")
    first, second = hash_chain(root, range(8), 4)
    prefill(m, "a", tuple(range(8)), salt="t")
    assert m.drain_events() == [Stored(first, root), Stored(second, first)]
    assert m.drain_events() == []
    m.free("a")
    m.allocate("b", (9,), "", 8)
    assert m.table("b") == (3, 2)
    assert m.drain_events() == [Removed(second)]


def test_undrained_events_stay_bounded_and_end_in_a_fresh_start(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_EVENTS", 3)
    m = make_blocks(block_tokens=1)
    prefill(m, "a", (1, 2, 3, 4))
    *_, fourth = hash_chain(root_hash("weights", ""), (1, 2, 3, 4), 1)
    events = m.drain_events()
    assert events[0] == Cleared()
    assert [e.block_hash for e in events[1:]] == [fourth]
    m.check()


def test_reset_forgets_content_but_keeps_tables():
    m = make_blocks(num_blocks=8)
    prefill(m, "idle", tuple(range(16)))
    m.free("idle")
    prefill(m, "running", COMMON[:32])
    m.drain_events()
    m.reset()
    assert m.drain_events() == [Cleared()]
    assert m.match((*range(16), 1), "") == 0
    assert m.match(COMMON, "") == 0
    m.check()
    # What follows was computed on top of forgotten content: it must not be shared either.
    m.extend("running", 48)
    m.commit("running", COMMON, 48)
    assert m.match((*COMMON, 1), "") == 0
    m.free("running")
    m.check()
    assert prefill(m, "new", COMMON) == 0
    assert m.match((*COMMON, 1), "") == 48


def test_without_prefix_caching_nothing_is_shared_and_freed_blocks_are_blank():
    m = make_blocks(num_blocks=5, prefix_caching=False)
    prefill(m, "a", COMMON)
    assert m.match((*COMMON, 1), "") == 0
    assert m.drain_events() == []
    m.free("a")
    m.check()
    assert drain(m) == (1, 2, 3, 4)


def test_hit_and_query_tokens_are_counted():
    m = make_blocks()
    prefill(m, "a", COMMON)
    prefill(m, "b", (*COMMON[:32], 1, 2))
    assert (m.num_query_tokens, m.num_hit_tokens) == (82, 32)


def test_a_prompt_that_waits_is_hashed_once(monkeypatch):
    hashed = []

    def counting(parent, token_ids):
        hashed.append(token_ids)
        return block_hash(parent, token_ids)

    block_hash = blocks.block_hash
    m = make_blocks(num_blocks=6)
    prefill(m, "a", COMMON)
    monkeypatch.setattr(blocks, "block_hash", counting)
    prompt = (*COMMON, *range(48))
    for _ in range(5):
        assert m.allocate("b", prompt, "", 96) is None
    assert len(hashed) == 4  # three hits and the first miss


def test_drift_is_noticed():
    m = make_blocks()
    prefill(m, "a", COMMON)
    m._refs[1] += 1
    with pytest.raises(AssertionError, match="reference counts drifted"):
        m.check()
