"""What tiers change in who is admitted, and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission.queue import Action, AdmissionQueue, Granted, QueueLimits, Refused
from deployments.admission.tiers import TierRule, TierTable
from deployments.link.messages import Acquire, Report
from engine.errors import ConfigError, Overloaded

TIERS = TierTable(
    [
        TierRule(name="priority", rank=0, reserved_slots=2),
        TierRule(name="default", rank=10, share=0.3),
        TierRule(name="fixed", rank=15, preemptible=False),
        TierRule(name="batch", rank=30, share=0.1, max_wait_s=300.0),
    ],
    revision=1,
)
RANKS = {name: rule.rank for name, rule in TIERS.rules.items()}


class Pool:
    """A queue, and decode replicas that start and end what was granted."""

    def __init__(self, slots: int = 4, *, replicas: int = 1, tokens: int = 100_000, **limits):
        limits = {"grant_expiry_s": 1000.0, "max_wait_s": 1000.0, **limits}
        self.queue = AdmissionQueue(1, QueueLimits(**limits), TIERS)
        self.slots, self.tokens = slots, tokens
        self.running: dict[str, list[tuple[str, int, int]]] = {f"d{i}": [] for i in range(replicas)}
        """By replica: tier, grant, KV tokens."""

        self.levels = {t: RANKS[t] for t, rule in TIERS.rules.items() if rule.preemptible}
        """What the engines would take back, and for whom."""

        self.tier_of: dict[int, str] = {}
        self.tickets = 0
        for name in self.running:
            self.report(name, 0.0)

    def report(self, name: str, now: float, **fields) -> list[Action]:
        running = self.running[name]
        alive = {tier: [e for e in running if e[0] == tier] for tier, _, _ in running}
        return self.queue.replica_reported(
            Report(
                replica_id=name,
                slots=self.slots,
                capacity_tokens=self.tokens,
                grants=tuple((1, grant, 1) for _, grant, _ in running),
                held_tokens=sum(tokens for _, _, tokens in running),
                alive=tuple(
                    (RANKS[tier], self.levels.get(tier), len(e), sum(t for *_, t in e))
                    for tier, e in alive.items()
                ),
                **fields,
            ),
            now,
        )

    def ask(self, tier: str, now: float = 0.0, *, tokens: int = 10, **fields) -> list[Action]:
        self.tickets += 1
        self.tier_of[self.tickets] = tier
        acquire = Acquire(
            ticket=self.tickets,
            cost_tokens=tokens,
            prompt_tokens=fields.pop("prompt", tokens // 2),
            priority=RANKS[tier],
            tier=tier,
            **fields,
        )
        actions = self.queue.acquire("g", acquire, now)
        self.queue.check()
        return actions

    def start(self, actions: list[Action], now: float = 0.0, tokens: int = 10) -> list[str]:
        """Run what was granted; the tiers that got in."""
        tiers: list[str] = []
        for action in actions:
            if isinstance(action, Granted):
                tier = self.tier_of[action.ticket]
                tiers.append(tier)
                name = action.grant.replica_id
                self.running[name].append((tier, action.grant.grant_id, tokens))
                tiers += self.start(self.report(name, now), now, tokens)
        self.queue.check()
        return tiers

    def end(self, tier: str, now: float = 0.0) -> list[str]:
        for name, running in self.running.items():
            for entry in running:
                if entry[0] == tier:
                    running.remove(entry)
                    return self.start(self.report(name, now), now)
        raise AssertionError(f"no {tier} runs")


def test_reserved_slots_are_left_free_for_those_above() -> None:
    pool = Pool(4)
    got = [pool.start(pool.ask("batch")) for _ in range(4)]
    assert got == [["batch"], ["batch"], [], []]
    assert [pool.start(pool.ask("priority")) for _ in range(2)] == [["priority"], ["priority"]]
    # Now the reservation is in use: what batch waits for are its own slots.
    assert pool.end("batch") == ["batch"]


def test_urgent_work_takes_the_slots_of_preemptible_work() -> None:
    pool = Pool(4)
    for _ in range(2):
        pool.start(pool.ask("batch"))
    got = [pool.start(pool.ask("priority")) for _ in range(5)]
    # Two free slots, then one of batch, which the engine takes back. Batch has a share: one stays.
    assert got == [["priority"]] * 3 + [[], []]
    assert pool.queue.free_slots == {"d0": -1}
    assert pool.start(pool.ask("batch")) == []
    assert pool.end("priority") == ["priority"]


def test_a_tier_without_a_share_gives_up_all_of_its_slots() -> None:
    pool = Pool(4)
    rules = [TierRule(name="priority", rank=0), TierRule(name="batch", rank=30)]
    pool.queue.policy(TierTable(rules, 2), QueueLimits(grant_expiry_s=1000.0), 0.0)
    for _ in range(4):
        pool.start(pool.ask("batch"))
    assert [pool.start(pool.ask("priority")) for _ in range(5)] == [["priority"]] * 4 + [[]]


def test_a_share_is_of_the_whole_pool_however_small_its_replicas_are() -> None:
    pool = Pool(4, replicas=5)
    for _ in range(20):
        pool.start(pool.ask("fixed" if len(pool.tier_of) < 10 else "batch"))
    granted = 0
    while pool.start(pool.ask("priority")):
        granted += 1
    # The two that are reserved, and of eight of batch all but a tenth of the pool's twenty.
    assert granted == 2 + 8 - 2
    assert sum(pool.queue.free_slots.values()) == -6


@pytest.mark.parametrize("level", [None, 0, -3])
def test_what_the_engine_cannot_take_back_is_not_counted_on(level: int | None) -> None:
    """None: its KV is on its way. Or it waited there until nobody else was more urgent."""
    pool = Pool(4)
    for tier in ("priority", "batch"):
        for _ in range(2):
            assert pool.start(pool.ask(tier)) == [tier]
    pool.levels["batch"] = level
    pool.report("d0", 0.0)
    assert pool.start(pool.ask("priority")) == []
    pool.levels["batch"] = RANKS["batch"]
    assert pool.start(pool.report("d0", 1.0)) == ["priority"]


def test_of_many_choices_as_many_are_kept_as_the_tier_keeps_slots() -> None:
    """One request for more than the tier keeps is no reason to keep none, or all."""
    pool = Pool(20)
    kept: list[int] = []
    for n in (5, 1, 1):  # of 20 slots `batch` keeps two
        (granted,) = pool.ask("batch", n=n)
        assert isinstance(granted, Granted)
        kept.append(granted.grant.kept)
    assert kept == [2, 0, 0]
    for n, expected in ((4, 4), (4, 2)):  # and `default` six
        (granted,) = pool.ask("default", n=n)
        assert isinstance(granted, Granted)
        assert granted.grant.kept == expected
    # Reported, they count as before.
    alive = ((30, None, 2, 0), (30, 30, 5, 0), (10, None, 6, 0), (10, 10, 2, 0))
    report = Report(
        replica_id="d0",
        slots=20,
        capacity_tokens=100_000,
        grants=tuple((1, grant + 1, n) for grant, n in enumerate((5, 1, 1, 4, 4))),
        alive=alive,
    )
    pool.queue.replica_reported(report, 0.0)
    (granted,) = pool.ask("batch", n=1)
    assert isinstance(granted, Granted)
    assert granted.grant.kept == 0
    # Four slots are free, and seven make way for `priority`.
    got = [len(pool.ask("priority")) for _ in range(13)]
    assert got == [1] * 11 + [0, 0]


def test_work_that_may_not_be_preempted_keeps_its_slots() -> None:
    pool = Pool(4)
    for _ in range(2):
        pool.start(pool.ask("fixed"))
    assert [pool.start(pool.ask("priority")) for _ in range(3)] == [["priority"]] * 2 + [[]]


def test_an_entry_that_does_not_fit_lets_more_urgent_ones_pass_and_no_others() -> None:
    pool = Pool(3, tokens=100)
    assert pool.start(pool.ask("default", tokens=40, prompt=40), tokens=40) == ["default"]
    assert pool.start(pool.ask("default", tokens=90, prompt=90)) == []
    assert pool.start(pool.ask("batch", tokens=10)) == []
    assert pool.start(pool.ask("priority", tokens=10)) == ["priority"]


def test_kv_room_is_counted_with_the_start_of_the_output() -> None:
    pool = Pool(8, tokens=200, reserve_output_tokens=50)
    # Prompt 20 and at most 50 of the 1,000 tokens of output set aside: two fit, the third waits.
    got = [pool.ask("priority", tokens=1020, prompt=20) for _ in range(3)]
    assert [len(actions) for actions in got] == [1, 1, 0]


def test_a_prompt_larger_than_the_pool_still_gets_an_idle_replica() -> None:
    pool = Pool(4, tokens=100)
    assert pool.start(pool.ask("priority", tokens=500, prompt=500)) == ["priority"]


def test_prompts_wait_while_the_prefill_pool_is_loaded() -> None:
    pool = Pool(8, max_prefilling_tokens=100)
    pool.report("d0", 0.0, prefilling_tokens=((10, 90),), prefill_replicas=1)
    assert pool.ask("default", prompt=20, tokens=30) == []
    assert pool.ask("batch", prompt=5, tokens=30) == []  # no overtaking from below
    actions = pool.report("d0", 1.0, prefilling_tokens=((10, 80),), prefill_replicas=1)
    assert [pool.tier_of[a.ticket] for a in actions if isinstance(a, Granted)] == ["default"]


def test_less_urgent_prompts_that_fill_the_prefill_pool_hold_nobody_back() -> None:
    pool = Pool(8, max_prefilling_tokens=100)
    pool.report("d0", 0.0, prefilling_tokens=((30, 90),), prefill_replicas=1)
    assert pool.ask("batch", prompt=20, tokens=30) == []
    assert len(pool.ask("priority", prompt=20, tokens=30)) == 1
    assert len(pool.ask("default", prompt=60, tokens=70)) == 1
    # 20 and 60 are promised: of its own and more urgent ranks there is no room for 30 more.
    assert pool.ask("default", prompt=30, tokens=40) == []
    assert len(pool.ask("priority", prompt=80, tokens=90)) == 1
    assert pool.ask("priority", prompt=1, tokens=2) == []
    assert pool.queue.prefilling_tokens == 90 + 20 + 60 + 80


def test_more_urgent_prompts_hold_back_and_a_prompt_beyond_the_budget_goes_alone() -> None:
    pool = Pool(8, max_prefilling_tokens=100)
    pool.report("d0", 0.0, prefilling_tokens=((0, 60), (30, 30)), prefill_replicas=1)
    assert pool.ask("default", prompt=50, tokens=60) == []
    actions = pool.report("d0", 1.0, prefilling_tokens=((30, 30),), prefill_replicas=1)
    assert [pool.tier_of[a.ticket] for a in actions if isinstance(a, Granted)] == ["default"]
    pool = Pool(8, max_prefilling_tokens=100)
    pool.report("d0", 0.0, prefilling_tokens=((30, 90),), prefill_replicas=1)
    assert len(pool.ask("default", prompt=500, tokens=510)) == 1


@given(
    under_way=st.lists(
        st.tuples(st.sampled_from(["priority", "default", "batch"]), st.integers(1, 60)), max_size=5
    ),
    asks=st.lists(
        st.tuples(st.sampled_from(["priority", "default", "batch"]), st.integers(1, 60)), max_size=8
    ),
)
def test_each_rank_fills_the_prefill_pool_to_its_budget_whatever_is_below(
    under_way: list[tuple[str, int]], asks: list[tuple[str, int]]
) -> None:
    pool = Pool(100, max_prefilling_tokens=100)
    reported = tuple((RANKS[tier], tokens) for tier, tokens in under_way)
    pool.report("d0", 0.0, prefilling_tokens=reported, prefill_replicas=1)
    taken = [*reported]
    waiting: set[int] = set()
    for tier, prompt in asks:
        rank = RANKS[tier]
        before = sum(tokens for other, tokens in taken if other <= rank)
        fits = (before == 0 or before + prompt <= 100) and rank not in waiting
        # Behind one of its own or a more urgent rank nobody passes.
        fits = fits and all(other > rank for other in waiting)
        granted = [
            a for a in pool.ask(tier, prompt=prompt, tokens=prompt) if isinstance(a, Granted)
        ]
        assert len(granted) == fits
        if fits:
            taken.append((rank, prompt))
        else:
            waiting.add(rank)


def test_what_is_overdue_behind_its_own_prompts_holds_nobody_up() -> None:
    pool = Pool(40, max_prefilling_tokens=100)
    pool.report("d0", 0.0, prefilling_tokens=((30, 90),), prefill_replicas=1)
    assert pool.ask("batch", prompt=20, tokens=30) == []
    for turn in range(30):
        assert len(pool.ask("default", float(turn), prompt=0, tokens=100)) == 1
    [entry] = pool.queue._waiters.values()
    assert pool.queue._order.overdue(entry)
    assert len(pool.ask("priority", 40.0, prompt=20, tokens=30)) == 1
    # Nothing of its own is under way any more: now the others leave it its turn.
    report = {"prefilling_tokens": ((0, 90),), "prefill_replicas": 1}
    pool.report("d0", 41.0, **report)
    assert pool.queue.waiting() == {"batch": 1}
    assert pool.ask("default", 42.0, prompt=0, tokens=100) == []


def test_a_flood_of_urgent_work_leaves_batch_its_share() -> None:
    """Of the freed slots, and of the slots it has: what it began is not all taken back."""
    pool = Pool(40)
    for _ in range(40):
        pool.start(pool.ask("priority"))
    for _ in range(200):
        pool.ask("batch")
        pool.ask("priority")
    started: list[str] = []
    for turn in range(600):
        pool.ask("priority")
        running = [tier for tier, _, _ in pool.running["d0"]]
        started += pool.end(running[7 * turn % len(running)])
    assert started.count("batch") / len(started) == pytest.approx(0.1, abs=0.03)
    assert [tier for tier, _, _ in pool.running["d0"]].count("batch") >= 3


def test_a_pool_smaller_than_its_reservations_serves_everybody() -> None:
    pool = Pool(1)
    assert pool.start(pool.ask("batch")) == ["batch"]


def test_many_choices_find_room_although_more_is_reserved_than_there_is() -> None:
    """Else they would wait at the head of their tier, and hold it up, until they time out."""
    pool = Pool(3)
    assert pool.start(pool.ask("batch", n=3)) == ["batch"]


def test_a_flood_of_few_choices_does_not_starve_many_from_below() -> None:
    pool = Pool(4)
    for _ in range(4):
        pool.start(pool.ask("fixed"))
    pool.ask("batch", n=2)
    turns = 0
    while pool.queue.waiting().get("batch"):
        pool.ask("fixed")
        pool.end("fixed")
        turns += 1
        assert turns < 60, "batch starves"
    # Four times its cost in tokens, at a share of 0.1.
    assert turns > 40


def test_what_is_overdue_does_not_hold_up_reserved_slots() -> None:
    pool = Pool(4)
    for _ in range(2):
        pool.start(pool.ask("fixed"))
    pool.ask("batch", n=2)
    pool.ask("fixed")
    while pool.end("fixed"):
        pool.ask("fixed")
    # One slot was freed for batch, which needs another one: `fixed` waits, `priority` does not.
    assert pool.queue.waiting() == {"batch": 1, "fixed": 1}
    assert pool.start(pool.ask("priority")) == ["priority"]


def full(pool: Pool, tier: str, n: int, **fields) -> None:
    """Fill all slots with what nobody outranks, and the queue with `n` entries."""
    for _ in range(pool.slots):
        pool.start(pool.ask("priority"))
    for _ in range(n):
        assert pool.ask(tier, **fields) == []


def test_a_full_queue_of_batch_does_not_lock_urgent_requests_out() -> None:
    pool = Pool(2, max_waiting=20)
    full(pool, "batch", 20)
    for urgent in range(18):
        [refused] = pool.ask("default")
        assert isinstance(refused, Refused)
        assert refused.ticket == 22 - urgent, "the last of batch makes way first"
        assert isinstance(refused.error, Overloaded)
        assert refused.error.code == "queue_full"
    # A tenth of the places are batch's own, and the next one of `default` has to go.
    [refused] = pool.ask("default")
    assert pool.tier_of[refused.ticket] == "default"
    assert pool.queue.waiting() == {"batch": 2, "default": 18}


def test_a_full_queue_has_places_for_the_share_of_tiers_below() -> None:
    pool = Pool(2, max_waiting=20)
    full(pool, "fixed", 20)
    assert [pool.tier_of[a.ticket] for _ in range(3) for a in pool.ask("batch")] == [
        "fixed",
        "fixed",
        "batch",
    ]
    assert pool.queue.waiting() == {"fixed": 18, "batch": 2}


def test_a_tenant_that_fills_the_queue_makes_way_for_others_of_its_tier() -> None:
    pool = Pool(2, max_waiting=8)
    full(pool, "default", 8, tenant="flood")
    refused = [pool.ask("default", tenant="polite")[0].ticket for _ in range(5)]
    # Down to an even split: the fifth of the polite one finds no place.
    assert refused == [10, 9, 8, 7, 15]


def test_what_was_admitted_before_finds_a_place_in_a_full_queue() -> None:
    pool = Pool(2, max_waiting=3)
    full(pool, "default", 3)
    assert pool.ask("batch", resumed=True) == []
    assert pool.queue.waiting() == {"default": 3, "batch": 1}


def test_who_would_wait_in_vain_is_told_at_once_with_the_estimate() -> None:
    pool = Pool(1)
    pool.start(pool.ask("default"))
    for i in range(30):
        pool.ask("default", tenant=f"t{i}")
    for second in range(1, 21):
        pool.end("default", float(second))  # one a second
    [refused] = pool.ask("default", 20.0, remaining_ms=3_000, tenant="new")
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Overloaded)
    assert refused.error.code == "queue_timeout"
    assert "about 11.0 s, more than the 3.0 s" in str(refused.error)
    assert refused.error.retry_after_s == pytest.approx(8.0, abs=0.5)
    # Who has the time waits, and who is urgent is not behind them.
    assert pool.ask("default", 20.0, remaining_ms=30_000, tenant="patient") == []
    [granted] = pool.ask("priority", 20.0, remaining_ms=3_000)
    assert isinstance(granted, Granted)


def test_what_waits_above_does_not_make_a_tier_with_a_share_hopeless() -> None:
    pool = Pool(1)
    pool.start(pool.ask("priority"))
    for i in range(40):
        pool.ask("priority", tenant=f"t{i}")
    for second in range(1, 21):
        pool.end("priority", float(second))  # one a second
    # Twenty are ahead of `default`; but of every ten grants three are its own.
    assert pool.ask("default", 20.0, remaining_ms=6_000) == []
    assert pool.queue.waiting() == {"priority": 20, "default": 1}
    [refused] = pool.ask("default", 20.0, remaining_ms=6_000)
    assert isinstance(refused, Refused)
    assert "about 6.7 s" in str(refused.error)  # its own two requests, at a share of 0.3
    # Who is above has that share before it, too.
    [refused] = pool.ask("priority", 20.0, remaining_ms=20_000, tenant="new")
    assert isinstance(refused, Refused)
    assert "about 22.0 s" in str(refused.error)


def test_without_a_known_pace_nobody_is_called_hopeless() -> None:
    pool = Pool(1)
    pool.start(pool.ask("default"))
    assert pool.ask("default", remaining_ms=1) == []


def test_a_queue_that_leads_again_takes_the_time_between_for_no_pace() -> None:
    pool = Pool(1)
    pool.start(pool.ask("default"))
    for i in range(30):
        pool.ask("default", tenant=f"t{i}")
    for second in range(1, 21):
        pool.end("default", float(second))  # one a second
    [refused] = pool.ask("default", 20.0, remaining_ms=3_000, tenant="new")
    assert isinstance(refused, Refused)
    pool.queue.lead(2)
    assert pool.ask("default", 25.0, remaining_ms=3_000, tenant="new") == []


def test_each_tier_has_its_own_longest_wait() -> None:
    pool = Pool(1, refuse_hopeless=False)
    assert pool.start(pool.ask("fixed")) == ["fixed"]
    for tier in ("default", "batch"):
        pool.ask(tier)
    assert pool.queue.oldest_ages_s(10.0) == {"default": 10.0, "batch": 10.0}
    refused = pool.queue.tick(60.0)
    assert [a.ticket for a in refused] == [2]
    assert [a.ticket for a in pool.queue.tick(300.0)] == [3]


def test_the_highest_revision_of_the_policy_holds() -> None:
    pool = Pool(4)
    for _ in range(3):
        pool.start(pool.ask("batch"))
    assert pool.queue.waiting() == {"batch": 1}
    old = TierTable([TierRule(name="batch", rank=30)], revision=0)
    assert pool.queue.policy(old, QueueLimits(), 0.0) == []
    new = TierTable([TierRule(name="batch", rank=30)], revision=2)
    [granted] = pool.queue.policy(new, QueueLimits(), 0.0)  # nothing is reserved any more
    assert isinstance(granted, Granted)


def test_limits_are_checked_and_travel() -> None:
    limits = QueueLimits(max_waiting=5, max_prefilling_tokens=77)
    assert QueueLimits.from_wire(limits.to_wire()) == limits
    with pytest.raises(ConfigError, match="reserve_output_tokens=0"):
        QueueLimits(reserve_output_tokens=0)
