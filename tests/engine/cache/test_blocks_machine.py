"""The block manager under arbitrary use, against a model of what each block really contains."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache import BlockManager, Cleared, Removed, Stored, hash_chain, root_hash
from engine.config import CacheConfig

NUM_BLOCKS = 9
SALTS = ("", "tenant")

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
salts = st.sampled_from(SALTS)


class BlockManagerMachine(RuleBasedStateMachine):
    block_tokens = 2
    reuse_tokens = None

    def __init__(self):
        super().__init__()
        config = CacheConfig(
            num_blocks=NUM_BLOCKS, block_tokens=self.block_tokens, reuse_tokens=self.reuse_tokens
        )
        self.manager = BlockManager(config, "weights")
        self.number = 0
        self.now = 0.0
        self.running = {}  # request id -> [token ids, salt, tokens computed]
        self.leases = {}  # lease id -> (blocks, deadline)
        self.written = {}  # block -> (salt, every token up to its end), as a pool would hold it
        self.index = set()  # what a listener to the events believes in

    def write(self, request_id, num_computed):
        tokens, salt, _ = self.running[request_id]
        table = self.manager.table(request_id)
        for index in range(-(-num_computed // self.block_tokens)):
            end = min(num_computed, (index + 1) * self.block_tokens)
            self.written[table[index]] = (salt, tuple(tokens[:end]))
        self.running[request_id][2] = num_computed
        self.manager.commit(request_id, tokens, num_computed)

    def execute(self, made=True, taken=()):
        """A step: its copies are made, or it fails. Some may be taken already."""
        for copy in (*taken, *self.manager.take_copies()):
            if made:
                salt, content = self.written[copy.source]
                start = (len(content) - 1) // self.block_tokens * self.block_tokens
                self.written[copy.target] = (salt, content[: start + copy.num_tokens])
        self.manager.settle_copies(made=made)

    @rule(tokens=prompts, salt=salts, reserve=st.integers(0, 4), copies=st.booleans())
    def allocate(self, tokens, salt, reserve, copies):
        request_id = f"r{self.number}"
        self.number += 1
        expected = self.manager.match(tokens, salt)
        fits = self.manager.fits(tokens, salt, len(tokens) + reserve)
        num_cached = self.manager.allocate(
            request_id, tokens, salt, len(tokens) + reserve, copies=copies
        )
        assert fits == (num_cached is not None)
        if num_cached is None:
            return
        copied = num_cached - expected
        assert num_cached < len(tokens)
        assert 0 <= copied < self.block_tokens
        if not copies or self.reuse_tokens is None:
            assert copied == 0
        else:
            assert copied % self.reuse_tokens == 0
        table = self.manager.table(request_id)
        assert len(table) == self.manager.config.blocks_for(len(tokens) + reserve)
        for index in range(expected // self.block_tokens):
            end = (index + 1) * self.block_tokens
            assert self.written[table[index]] == (salt, tokens[:end]), "shared the wrong content"
        self.running[request_id] = [list(tokens), salt, num_cached]
        if copied:
            copy = self.manager._copying[-1].copy
            assert (copy.target, copy.num_tokens) == (table[expected // self.block_tokens], copied)
            theirs, content = self.written[copy.source]
            assert (theirs, content[:num_cached]) == (salt, tokens[:num_cached]), (
                "copied the wrong content"
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def compute(self, data, more):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.execute()
        tokens, salt, num_computed = self.running[request_id]
        last = (num_computed - 1) // self.block_tokens
        if num_computed % self.block_tokens:  # the copy that admission promised
            held = self.written[self.manager.table(request_id)[last]]
            assert held == (salt, tuple(tokens[:num_computed]))
        wanted = len(tokens) + len(more)
        free = self.manager.num_free_blocks
        before = self.manager.table(request_id)
        grown = self.manager.extend(request_id, wanted)
        missing = max(0, self.manager.config.blocks_for(wanted) - len(before))
        assert grown == (missing <= free)
        assert self.manager.table(request_id)[: len(before)] == before
        if not grown:
            assert self.manager.table(request_id) is before
            return
        tokens.extend(more)
        self.write(request_id, data.draw(st.integers(num_computed, len(tokens))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request_id]
        self.manager.free(request_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), after=st.integers(1, 5))
    def lease(self, data, after):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        lease_id = f"lease{self.number}"
        self.number += 1
        self.manager.lease(lease_id, request_id, self.now + after)
        self.leases[lease_id] = (self.manager.table(request_id), self.now + after)

    @rule()
    def a_step_fails(self):
        self.execute(made=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancelled_while_copies_are_made(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        taken = self.manager.take_copies()
        del self.running[request_id]
        self.manager.free(request_id)
        busy = {b for copy in taken for b in (copy.source, copy.target)}
        assert not busy & {*self.manager._blank, *self.manager._evictable}
        assert self.manager.take_copies() == ()
        self.execute(taken=taken)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), after=st.integers(1, 5))
    def renew(self, data, after):
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        assert self.manager.renew(lease_id, self.now + after)
        self.leases[lease_id] = (self.leases[lease_id][0], self.now + after)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease_id]
        assert self.manager.release(lease_id)

    @rule(passed=st.integers(0, 3))
    def expire(self, passed):
        self.now += passed
        due = {name for name, (_, deadline) in self.leases.items() if deadline <= self.now}
        assert set(self.manager.expire(self.now)) == due
        for lease_id in due:
            del self.leases[lease_id]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=prompts, salt=salts, num_tokens=st.integers(1, 16))
    def freeing_some_makes_exactly_the_room_that_fits_foretold(
        self, data, tokens, salt, num_tokens
    ):
        victims = data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True))
        foretold = self.manager.fits(tokens, salt, num_tokens, freeing=victims)
        for request_id in victims:
            del self.running[request_id]
            self.manager.free(request_id)
        got = self.manager.allocate("probe", tokens, salt, num_tokens)
        assert foretold == (got is not None)
        if got is not None:
            self.manager.free("probe")

    @rule(tokens=prompts)
    def tenants_see_only_their_own(self, tokens):
        for salt in SALTS:
            root = root_hash("weights", salt)
            known = 0
            for digest in hash_chain(root, tokens[:-1], self.block_tokens):
                if digest not in self.index:
                    break
                known += self.block_tokens
            assert self.manager.match(tokens, salt) == known

    @precondition(lambda self: self.number % 7 == 6)
    @rule()
    def reset(self):
        self.manager.reset()
        assert all(self.manager.match((*p, 0), "") == 0 for p in ((0, 0), (0, 1), (1, 0), (1, 1)))

    @invariant()
    def books_balance(self):
        self.manager.check()
        held = Counter(b for r in self.running for b in self.manager.table(r))
        held.update(b for blocks, _ in self.leases.values() for b in blocks)
        copies = [copying.copy for copying in self.manager._copying]
        held.update(b for copy in copies for b in (copy.source, copy.target))
        assert self.manager.num_held_blocks == len(held)
        assert self.manager.num_leases == len(self.leases)
        for name, (blocks, _) in self.leases.items():
            assert self.manager.leased_table(name) == blocks

    @invariant()
    def events_tell_the_whole_story(self):
        for event in self.manager.drain_events():
            match event:
                case Stored(digest, _):
                    assert digest not in self.index
                    self.index.add(digest)
                case Removed(digest):
                    self.index.remove(digest)
                case Cleared():
                    self.index.clear()

    def teardown(self):
        for request_id in self.running:
            self.manager.free(request_id)
        self.manager.expire(float("inf"))
        self.manager.settle_copies(made=True)
        self.manager.check()
        assert self.manager.num_held_blocks == 0
        assert self.manager.num_leases == 0


class PartsMachine(BlockManagerMachine):
    """Large blocks, of which parts are copied."""

    block_tokens = 4
    reuse_tokens = 1


class PairsMachine(BlockManagerMachine):
    block_tokens = 6
    reuse_tokens = 2


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestParts = PartsMachine.TestCase
TestParts.settings = TestBlockManager.settings
TestPairs = PairsMachine.TestCase
TestPairs.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
