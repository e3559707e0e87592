"""Grants past the slots of work that makes way: pure queue and the engine's scheduler together."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission.queue import Action, AdmissionQueue, Granted, QueueLimits
from deployments.admission.tiers import TierRule, TierTable
from deployments.link.messages import UNTAKABLE, Acquire, Report
from engine.cache import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.request import Request, SampledToken, SamplingParams
from engine.scheduling import Scheduler, StepResult

SLOTS = 2
RANKS = {"priority": 0, "default": 10, "batch": 30}
RULES = [
    TierRule(name="priority", rank=0, preemptible=False),
    TierRule(name="batch", rank=30),
]
WITH_SHARES = [
    TierRule(name="priority", rank=0, preemptible=False),
    TierRule(name="default", rank=10, share=0.3),
    TierRule(name="batch", rank=30, share=0.1),
]


class Replica:
    """What a decode replica does with grants, a step a second."""

    def __init__(self, rules: list[TierRule] = RULES, slots: int = SLOTS) -> None:
        limits = QueueLimits(max_wait_s=1e6, refuse_hopeless=False)
        self.queue = AdmissionQueue(1, limits, TierTable(rules, 1))
        self.slots = slots
        self.kept: set[str] = set()
        self.scheduler = Scheduler(
            SchedulerConfig(max_running_requests=slots, ageing_s=1000.0),
            BlockManager(CacheConfig(num_blocks=1000, block_tokens=4), "weights"),
            eos_token_ids=(0,),
            max_context_tokens=1000,
        )
        self.now = 0.0
        self.count = 0
        self.tiers: dict[str, str] = {}
        self.grants: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.pulling: set[str] = set()
        self.ran: set[str] = set()
        self.carry_out(self.report())

    def report(self) -> list[Action]:
        alive: Counter[tuple[int, int | None]] = Counter()
        for name in self.grants:
            rank = RANKS[self.tiers[name]]
            level = UNTAKABLE if name in self.pulling else rank
            alive[rank, level if self.makes_way(name) else None] += 1
        grants = tuple((1, grant, 1) for grant in self.grants.values())
        report = Report(
            replica_id="d",
            slots=self.slots,
            capacity_tokens=4000,
            grants=grants,
            alive=tuple((rank, level, n, 8 * n) for (rank, level), n in alive.items()),
        )
        return self.queue.replica_reported(report, self.now)

    def makes_way(self, name: str) -> bool:
        return self.tiers[name] != "priority" and name not in self.kept

    def ask(self, tier: str, tokens: int = 4, pulling: bool = False) -> str:
        """`pulling`: until the next step it says that nothing can take its slot."""
        self.count += 1
        name = f"{tier}{self.count}"
        self.tiers[name] = tier
        self.wanted[name] = tokens
        if pulling:
            self.pulling.add(name)
        acquire = Acquire(
            ticket=self.count, cost_tokens=12, prompt_tokens=8, tier=tier, priority=RANKS[tier]
        )
        self.carry_out(self.queue.acquire("g", acquire, self.now))
        return name

    def carry_out(self, actions: list[Action]) -> None:
        granted = [action for action in actions if isinstance(action, Granted)]
        for action in granted:
            (name,) = (n for n in self.tiers if n.removeprefix(self.tiers[n]) == str(action.ticket))
            self.grants[name] = action.grant.grant_id
            if action.grant.kept:
                self.kept.add(name)
            ids = tuple(range(100 * action.ticket, 100 * action.ticket + 8))
            tier = self.tiers[name]
            request = Request(
                request_id=name,
                prompt_ids=ids,
                params=SamplingParams(max_tokens=self.wanted[name]),
                priority=RANKS[tier],
                preemptible=self.makes_way(name),
            )
            self.scheduler.add(request, self.now)
        if granted:
            self.carry_out(self.report())

    def step(self) -> set[str]:
        """Who was computed."""
        alive = set(self.grants)
        if self.pulling & alive:
            self.pulling -= alive
            self.carry_out(self.report())
            alive = set(self.grants)
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        ran = {chunk.request_id for chunk in plan.chunks}
        for rule in self.queue.tiers.rules.values():
            least = self.queue._kept_slots(self.slots).get(rule.rank, 0)
            if any(self.tiers[name] == rule.name for name in self.ran & alive - ran):
                left = sum(self.tiers[name] == rule.name for name in ran)
                assert left >= least, f"{rule.name} lost a slot and has {left} of {least}"
        self.ran = ran
        self.now += 1.0
        sampled = {c.request_id: SampledToken(7) for c in plan.chunks if c.sample}
        for committed in self.scheduler.commit(plan, StepResult(sampled), self.now):
            name = committed.request_id
            self.tokens[name] = self.tokens.get(name, 0) + 1
            if committed.finish is not None:
                del self.grants[name]
        self.scheduler.check()
        self.carry_out(self.report())
        self.queue.check()
        return ran


def test_urgent_work_runs_in_the_very_next_step_and_batch_comes_back_with_all_of_its_tokens():
    replica = Replica()
    batch = [replica.ask("batch") for _ in range(4)]
    assert replica.step() == set(batch[:2])
    urgent = [replica.ask("priority"), replica.ask("priority")]
    assert replica.step() == set(urgent)
    late = replica.ask("priority")
    assert late not in replica.grants, "granted past slots that nobody gives up"
    order: list[set[str]] = []
    while replica.grants:
        order.append(replica.step())
    first = {name: next(i for i, s in enumerate(order) if name in s) for name in (late, *batch)}
    assert first[late] <= min(first[name] for name in batch)
    assert max(first[name] for name in batch[:2]) <= min(first[name] for name in batch[2:])
    assert replica.tokens == dict.fromkeys((*batch, *urgent, late), 4)


def test_no_more_is_granted_than_slots_and_what_gave_its_own_up():
    replica = Replica()
    for _ in range(6):
        replica.ask("batch")
    for _ in range(6):
        replica.ask("priority")
    assert sorted(replica.tiers[name] for name in replica.grants) == [
        "batch",
        "batch",
        "priority",
        "priority",
    ]
    while replica.grants:
        assert len(replica.step()) <= SLOTS
        assert len(replica.grants) <= 2 * SLOTS
    assert replica.tokens == dict.fromkeys(replica.tiers, 4)


def test_what_a_tier_keeps_is_not_what_the_engine_takes_back_for_a_flood():
    """The engine takes the least urgent first, and must not take batch's only slot where it is
    `default` that has more than it keeps."""
    replica = Replica(WITH_SHARES, slots=10)
    batch = [replica.ask("batch") for _ in range(2)]
    default = [replica.ask("default") for _ in range(8)]
    assert replica.kept == {batch[0], *default[:3]}
    replica.step()
    while any(name in replica.grants for name in batch):
        for _ in range(8):
            replica.ask("priority")
        ran = replica.step()
        assert batch[0] in ran or batch[0] not in replica.grants
        assert len(ran & set(default)) >= 3 or replica.tokens[default[0]] == 4
    assert replica.tokens[batch[0]] == 4


def test_requests_whose_kv_is_on_its_way_are_not_taken_for_kept_ones():
    replica = Replica(WITH_SHARES, slots=10)
    kept = [replica.ask("default", tokens=1) for _ in range(3)]
    pulled = [replica.ask("default", pulling=True) for _ in range(5)]
    assert replica.kept == set(kept)
    replica.step()
    replica.pulling.update(pulled)
    later = [replica.ask("default") for _ in range(4)]
    assert replica.kept == {*kept, *later[:3]}
    assert not replica.kept & set(pulled)


def test_where_the_kept_ones_of_a_tier_have_ended_the_rest_of_it_is_not_taken_either():
    replica = Replica(WITH_SHARES, slots=10)
    first = replica.ask("batch", tokens=1)
    last = replica.ask("batch", tokens=9)
    for _ in range(8):
        replica.ask("default", tokens=9)
    assert first in replica.kept
    assert last not in replica.kept
    replica.step()
    while last in replica.grants:
        for _ in range(3):
            replica.ask("priority")
        assert last in replica.step()


def test_a_kept_request_that_is_overtaken_before_its_first_step_runs_in_that_step_all_the_same():
    replica = Replica(WITH_SHARES, slots=3)
    default = [replica.ask("default", tokens=9) for _ in range(2)]
    replica.step()
    kept = replica.ask("batch")
    assert kept in replica.kept
    urgent = replica.ask("priority")
    # The slot that it gets is that of the second `default`, not the one of `batch`.
    assert replica.step() == {default[0], kept, urgent}


lives = st.lists(
    st.tuples(
        st.sampled_from(sorted(RANKS)),
        st.integers(1, 4),
        st.integers(0, 2),
        st.integers(1, 6),
        st.booleans(),
    ),
    max_size=40,
)


@given(lives, st.sampled_from([RULES, WITH_SHARES]), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_what_the_queue_counts_on_is_what_the_engine_does(life, rules, slots: int):
    """Whatever comes in whatever order: urgent work runs in the step after its grant and in every
    step from then on, no tier is left with fewer slots than it keeps, and all are served."""
    rules = [replace(rule, max_wait_s=1e6) for rule in rules]
    names = {rule.name for rule in rules}
    pool = Replica(rules, slots)
    for tier, count, steps, tokens, pulling in life:
        for _ in range(count):
            pool.ask(tier if tier in names else "batch", tokens, pulling and tier != "priority")
        for _ in range(steps):
            if pool.grants:
                urgent = {name for name in pool.grants if pool.tiers[name] == "priority"}
                assert urgent <= pool.step()
    while pool.grants:
        pool.step()
    assert pool.tokens == pool.wanted
