"""`tailrace bench batching`: fixed step budgets against the one that follows its requests' targets.

The engine's own scheduler plans every step; what a step takes is a sum of stated prices instead of
a forward pass, so the result is the same on any machine and says which *policy* is better, not how
fast this machine is. Each policy meets the same arrivals. A load is attained when the 95th
percentile of times to the first token and of all gaps between tokens both keep their targets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from cluster.bench.loads import poisson_times
from cluster.bench.summary import percentile, significant
from engine.cache import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.request import Request, SampledToken, SamplingParams
from engine.scheduling import Scheduler, StepPlan, StepResult
from engine.scheduling.cost import prompt_work, row_work

Say = Callable[[str], None]

BUDGETS = (64, 128, 256, 512)
PERCENT = 95.0
BLOCK_TOKENS = 16
EXPECTED_ROWS = 16
"""Batch at which a machine's capacity is reckoned: loads are fractions of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of a step: what it costs anyway, and for each part of its work."""

    step_s: float
    row_s: float
    """A token of a running stream."""

    prompt_token_s: float
    read_s: float
    """A KV token visited by attention."""

    noise: float = 0.1
    """Steps take up to so much more or less, evenly."""

    def seconds(self, plan: StepPlan) -> float:
        total = self.step_s
        for chunk in plan.chunks:
            n = len(chunk.token_ids)
            work = row_work(chunk.end) if n == 1 else prompt_work(chunk.first_token, n)
            total += self.row_s * work.rows + self.prompt_token_s * work.prompt_tokens
            total += self.read_s * work.reads
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Requests with lengths between half and twice a middle, and what they are promised."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float

    def capacity(self, prices: Prices) -> float:
        """Requests a second that would fill the machine, at `EXPECTED_ROWS` streams a step."""
        context = self.prompt_tokens + self.output_tokens / 2
        each_row_s = prices.step_s / EXPECTED_ROWS + prices.row_s + prices.read_s * context
        prompt_s = self.prompt_tokens * (
            prices.prompt_token_s + prices.read_s * self.prompt_tokens / 2
        )
        return 1.0 / (prompt_s + self.output_tokens * each_row_s)


MACHINES = {
    # Small model on two cores: a prompt token costs nearly as much as a stream's.
    "laptop": Prices(step_s=0.008, row_s=0.0008, prompt_token_s=0.0004, read_s=2e-8),
    # 8B model on one large GPU: weights are read whatever a step holds, prompts are cheap.
    "gpu": Prices(step_s=0.008, row_s=0.00005, prompt_token_s=0.00004, read_s=1e-9),
}

MIXES = {
    ("laptop", "chat"): Mix(prompt_tokens=100, output_tokens=80, ttft_s=1.0, itl_s=0.1),
    ("laptop", "documents"): Mix(prompt_tokens=600, output_tokens=40, ttft_s=2.0, itl_s=0.2),
    ("gpu", "chat"): Mix(prompt_tokens=400, output_tokens=150, ttft_s=0.5, itl_s=0.03),
    ("gpu", "documents"): Mix(prompt_tokens=3000, output_tokens=100, ttft_s=2.0, itl_s=0.02),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated."""

    requests: int = 300
    """Of each load; the first tenth is not judged."""

    loads: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    """Fractions of the capacity."""

    seed: int = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of the requests of one run that count."""

    ttft_p95_s: float
    itl_p95_s: float

    def attains(self, mix: Mix) -> bool:
        return self.ttft_p95_s <= mix.ttft_s and self.itl_p95_s <= mix.itl_s


def bench_batching(effort: Effort, say: Say) -> dict[str, Any]:
    """Every policy on every machine, mix and load. Deterministic by the seed."""
    cases: list[dict[str, Any]] = []
    for (machine, name), mix in MIXES.items():
        prices = MACHINES[machine]
        capacity = mix.capacity(prices)
        say(f"{machine}, {name}: capacity {capacity:.2f} requests a second")
        rows: list[dict[str, Any]] = []
        for load in effort.loads:
            arrivals = arrivals_of(mix, load * capacity, effort)
            row: dict[str, Any] = {"load": load}
            for policy in ("slo", *BUDGETS):
                found = serve(arrivals, mix, prices, policy, seed=effort.seed)
                row[str(policy)] = {
                    "ttft_p95_s": significant(found.ttft_p95_s),
                    "itl_p95_s": significant(found.itl_p95_s),
                    "attains": found.attains(mix),
                }
            rows.append(row)
        cases.append(
            {
                "machine": machine,
                "prices": asdict(prices),
                "mix": name,
                **asdict(mix),
                "capacity_rate": significant(capacity),
                "loads": rows,
            }
        )
    attained = {
        str(policy): sum(row[str(policy)]["attains"] for case in cases for row in case["loads"])
        for policy in ("slo", *BUDGETS)
    }
    best = max((str(budget) for budget in BUDGETS), key=lambda policy: attained[policy])
    return {
        "step_costs": "stated",
        "percent": PERCENT,
        "requests": effort.requests,
        "num_loads": len(cases) * len(effort.loads),
        "attained": attained,
        "slo_attained": attained["slo"],
        "best_fixed_attained": attained[best],
        "best_fixed_budget": int(best),
        "cases": cases,
    }


def arrivals_of(mix: Mix, rate: float, effort: Effort) -> list[Arrival]:
    """The same for every policy."""
    rng = random.Random(effort.seed)
    times = poisson_times(rate, 2 * effort.requests / rate, rng)[: effort.requests]

    def around(middle: int) -> int:
        return max(2, round(middle * 2 ** rng.uniform(-1.0, 1.0)))

    return [Arrival(at, around(mix.prompt_tokens), around(mix.output_tokens)) for at in times]


def serve(
    arrivals: Sequence[Arrival], mix: Mix, prices: Prices, policy: int | str, *, seed: int
) -> Latencies:
    """One policy on one load: a fixed budget of tokens a step, or `slo`."""
    fixed = policy if isinstance(policy, int) else None
    budget = fixed or max(BUDGETS)
    scheduler = _scheduler(budget, pacing=fixed is None)
    rng = random.Random(seed)
    came: dict[str, list[float]] = {}
    now = 0.0
    following = 0
    while following < len(arrivals) or scheduler.has_work:
        while following < len(arrivals) and arrivals[following].at_s <= now:
            scheduler.add(_request(following, arrivals[following], mix), arrivals[following].at_s)
            following += 1
        plan = scheduler.plan(now)
        if plan is None:
            now = arrivals[following].at_s
            continue
        now += prices.seconds(plan) * rng.uniform(1 - prices.noise, 1 + prices.noise)
        tokens = {chunk.request_id: SampledToken(7) for chunk in plan.chunks if chunk.sample}
        for committed in scheduler.commit(plan, StepResult(tokens), now):
            came.setdefault(committed.request_id, []).append(now)
    counted = range(len(arrivals) // 10, len(arrivals))
    ttfts = [came[str(i)][0] - arrivals[i].at_s for i in counted]
    gaps = [later - sooner for i in counted for sooner, later in pairwise(came[str(i)])]
    return Latencies(percentile(ttfts, PERCENT), percentile(gaps, PERCENT))


def _scheduler(budget: int, *, pacing: bool) -> Scheduler:
    cache = CacheConfig(num_blocks=200_000, block_tokens=BLOCK_TOKENS, prefix_caching=False)
    return Scheduler(
        SchedulerConfig(
            max_running_requests=256,
            max_waiting_requests=100_000,
            max_step_tokens=budget,
            max_chunk_tokens=budget,
            pacing=pacing,
        ),
        BlockManager(cache, "bench"),
        eos_token_ids=(0,),
        max_context_tokens=32_768,
    )


def _request(i: int, arrival: Arrival, mix: Mix) -> Request:
    return Request(
        request_id=str(i),
        prompt_ids=(5,) * arrival.prompt_tokens,
        params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True),
        itl_target_ms=round(1000 * mix.itl_s),
        first_token_ms=round(1000 * mix.ttft_s),
    )


def table(result: dict[str, Any]) -> list[str]:
    """For people: by case and load who keeps both targets."""
    policies = list(result["attained"])
    lines = [
        f"simulated: the scheduler is the engine's, what a step takes is {result['step_costs']}, "
        "not measured (prices below; with --json each case's `prices`)",
    ]
    for case in result["cases"]:
        prices = case["prices"]
        lines += [
            f"{case['machine']}, {case['mix']}: prompt {case['prompt_tokens']}, output "
            f"{case['output_tokens']}, first token {case['ttft_s']:g} s, gap {case['itl_s']:g} s, "
            f"capacity {case['capacity_rate']}/s; p95 of first token/gap, * where both are kept",
            f"a step: {1000 * prices['step_s']:g} ms, {1000 * prices['row_s']:g} ms a stream, "
            f"{1000 * prices['prompt_token_s']:g} ms a prompt token, "
            f"{1e6 * prices['read_s']:g} us a KV token read",
            f"{'load':>6}" + "".join(f"{policy:>16}" for policy in policies),
        ]
        for row in case["loads"]:
            cells = (
                f"{row[p]['ttft_p95_s']:.3g}/{row[p]['itl_p95_s']:.3g}"
                f"{'*' if row[p]['attains'] else ' '}"
                for p in policies
            )
            lines.append(f"{row['load']:6g}" + "".join(f"{cell:>16}" for cell in cells))
    kept = ", ".join(f"{policy} {count}" for policy, count in result["attained"].items())
    return [*lines, f"loads attained of {result['num_loads']}: {kept}"]
