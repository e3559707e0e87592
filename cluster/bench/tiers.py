"""`tailrace bench tiers`: what interactive users feel of batch work that fills the cluster.

Three loads on one cluster, one after the other: interactive requests alone; the same with as many
batch callers as fill every slot and then some; the same again with everybody in one tier. The
interactive arrivals are the same Poisson process each time.

What interactive leaves to batch is what batch gets where nobody goes first, beside the very same
requests. It is not what batch does alone less the interactive tokens: those ride in steps that are
taken anyway, and have shorter prompts, so they cost a real engine less than as many of batch.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from cluster.bench.client import StreamResult
from cluster.bench.loads import Ask, Target, at_times, poisson_times
from cluster.bench.stack import SYNTHETIC, Stack, own_stack_of, synthetic_stack
from cluster.bench.summary import percentile, significant
from cluster.bench.worker import Server
from cluster.errors import ClusterError

Say = Callable[[str], None]
T = TypeVar("T")

INTERACTIVE, BATCH, ONE_TIER = "priority", "batch", "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Targets, loads and budgets, stated before anything is measured."""

    model: str
    slots: int
    ttft_s: float
    itl_s: float
    """A request's mean gap between tokens."""

    interactive_rate: float
    interactive_samples: int
    interactive_prompt: int
    """Words of its prompt."""

    interactive_tokens: int
    batch_callers: int
    batch_prompt: int
    batch_tokens: int
    alone_s: float
    """How long batch runs alone."""

    @property
    def over_s(self) -> float:
        return self.interactive_samples / self.interactive_rate

    def gateway(self) -> dict[str, Any]:
        """`user_config` that promises this to the interactive tier."""
        promise = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "queue_s": self.ttft_s / 2}
        patient = {"queue_s": None, "ttft_s": None, "itl_s": None, "e2e_s": None}
        return {
            "tiers": {
                INTERACTIVE: {"rank": 0, "preemptible": False, **promise},
                ONE_TIER: {"rank": 10, **promise},
                BATCH: {"rank": 30, "max_wait_s": 3600, **patient},
            }
        }


def synthetic_plan(*, quick: bool) -> Plan:
    """Slots are what is scarce: 8 of them, 100 tokens a second each."""
    return Plan(
        model=SYNTHETIC,
        slots=8,
        ttft_s=0.25,
        itl_s=0.03,
        interactive_rate=25.0,
        interactive_samples=50 if quick else 1000,
        interactive_prompt=10,
        interactive_tokens=10,
        batch_callers=16,
        batch_prompt=10,
        batch_tokens=60,
        alone_s=2.0 if quick else 10.0,
    )


def laptop_plan(model: str, *, quick: bool) -> Plan:
    """Two cores are what is scarce, shared by both pools of a small model."""
    return Plan(
        model=model,
        slots=8,
        ttft_s=1.0,
        itl_s=0.15,
        interactive_rate=5.0 if quick else 12.0,
        interactive_samples=20 if quick else 1000,
        interactive_prompt=12,
        interactive_tokens=4,
        batch_callers=12,
        batch_prompt=60,
        batch_tokens=48,
        alone_s=5.0 if quick else 20.0,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One load, as it went."""

    interactive: list[StreamResult]
    batch_tokens: int
    """That came within the load's time, whole answers or not."""

    over_s: float


def tokens_of(result: StreamResult) -> int:
    """What came of an answer, whole or not."""
    return result.completion_tokens or len(result.arrivals_s)


def bench_tiers(*, real: bool, quick: bool, say: Say) -> dict[str, Any]:
    """On the synthetic engine, or on the packaged configuration's model (`real`).

    Raises ClusterError, DeployFailed where no cluster can be started or asked.
    """
    if not real:
        plan = synthetic_plan(quick=quick)
        with synthetic_stack(say, gateway=plan.gateway(), slots=plan.slots) as stack:
            return measure(stack, plan, say)
    plan = laptop_plan("", quick=quick)
    pool = {"max_running_requests": plan.slots}
    with own_stack_of(say, gateway=plan.gateway(), pool=pool) as stack:
        models = [each.name for each in stack.models()]
        return measure(stack, laptop_plan(models[0], quick=quick), say)


def measure(stack: Stack, plan: Plan, say: Say) -> dict[str, Any]:
    """All loads on one running cluster."""
    say(f"plan: {asdict(plan)}")
    times_s = poisson_times(plan.interactive_rate, 2 * plan.over_s + 10, random.Random(1))[
        : plan.interactive_samples
    ]
    _run(_load(stack.url, plan, times_s[: plan.slots], INTERACTIVE, BATCH, 2.0))  # warm
    say(f"batch alone for {plan.alone_s:g} s")
    batch = _run(_load(stack.url, plan, [], INTERACTIVE, BATCH, plan.alone_s))
    say(f"interactive alone: {len(times_s)} requests in {times_s[-1]:.0f} s")
    alone = _run(_load(stack.url, plan, times_s, INTERACTIVE, None, times_s[-1]))
    say(f"the same, with {plan.batch_callers} batch callers for {plan.slots} slots")
    tiered = _run(_load(stack.url, plan, times_s, INTERACTIVE, BATCH, times_s[-1]))
    say("the same, all in one tier")
    untiered = _run(_load(stack.url, plan, times_s, ONE_TIER, ONE_TIER, times_s[-1]))
    return {
        "plan": asdict(plan),
        **headline(plan, alone, tiered, untiered),
        "interactive_alone": figures(plan, alone),
        "tiered": figures(plan, tiered),
        "untiered": figures(plan, untiered),
        "batch_alone_tokens_rate": significant(batch.batch_tokens / batch.over_s),
    }


def headline(plan: Plan, alone: Part, tiered: Part, untiered: Part) -> dict[str, Any]:
    """The keys that are asked for."""
    left = untiered.batch_tokens / untiered.over_s
    got = tiered.batch_tokens / tiered.over_s
    with_batch, without = figures(plan, tiered), figures(plan, alone)
    p99, p99_alone = with_batch["ttft_p99_s"], without["ttft_p99_s"]
    return {
        "interactive_samples": len(tiered.interactive),
        "interactive_attainment": with_batch["attainment"],
        "interactive_attainment_untiered": figures(plan, untiered)["attainment"],
        "batch_capacity_share": significant(got / left) if left > 0 else None,
        "interactive_ttft_p99_ratio": (
            significant(p99 / p99_alone) if p99 is not None and p99_alone else None
        ),
        "interactive_itl_p99_s": with_batch["itl_p99_s"],
    }


def figures(plan: Plan, part: Part) -> dict[str, Any]:
    """One load's interactive side: a request attains if it keeps both targets; a refused or failed
    one does not."""
    whole = [result for result in part.interactive if result.end_s is not None]
    ttfts = [r.arrivals_s[0] - r.sent_s for r in whole if r.arrivals_s]
    gaps = [mean_gap_s(r) for r in whole if len(r.arrivals_s) > 1]
    kept = sum(
        bool(r.arrivals_s)
        and r.arrivals_s[0] - r.sent_s <= plan.ttft_s
        and mean_gap_s(r) <= plan.itl_s
        for r in whole
    )
    return {
        "requests": len(part.interactive),
        "answered": len(whole),
        "attainment": significant(kept / len(part.interactive)) if part.interactive else None,
        "ttft_p50_s": significant(statistics.median(ttfts)) if ttfts else None,
        "ttft_p99_s": significant(percentile(ttfts, 99)) if ttfts else None,
        "itl_p99_s": significant(percentile(gaps, 99)) if gaps else None,
        "batch_tokens_rate": significant(part.batch_tokens / part.over_s),
    }


def mean_gap_s(result: StreamResult) -> float:
    """Between two tokens of one answer, 0 where there is but one."""
    arrivals = result.arrivals_s
    return (arrivals[-1] - arrivals[0]) / max(1, tokens_of(result) - 1)


def table(result: dict[str, Any]) -> list[str]:
    """For people: the plan first."""
    plan = result["plan"]
    lines = [
        f"{plan['model']}: first token within {plan['ttft_s']:g} s, {plan['itl_s']:g} s a token; "
        f"{plan['interactive_samples']} interactive requests of {plan['interactive_tokens']} "
        f"tokens at {plan['interactive_rate']:g}/s; {plan['batch_callers']} batch callers of "
        f"{plan['batch_tokens']} tokens, {plan['slots']} slots",
        f"{'':20}{'attained':>10}{'TTFT p50':>10}{'p99 s':>10}{'ITL p99':>10}{'batch tok/s':>13}",
    ]
    for name in ("interactive_alone", "tiered", "untiered"):
        row = result[name]
        columns = ("attainment", "ttft_p50_s", "ttft_p99_s", "itl_p99_s")
        cells = "".join(f"{row[column]!s:>10}" for column in columns)
        lines.append(f"{name:20}{cells}{row['batch_tokens_rate']:>13}")
    lines.append(f"batch alone: {result['batch_alone_tokens_rate']} tokens a second")
    for key in ("batch_capacity_share", "interactive_ttft_p99_ratio"):
        lines.append(f"{key:28}{result[key]}")
    return lines


def ask_of(plan: Plan, kind: str, tier: str, i: int) -> Ask:
    """`kind` says how large, `tier` how urgent."""
    interactive = kind == INTERACTIVE
    words = plan.interactive_prompt if interactive else plan.batch_prompt
    tokens = plan.interactive_tokens if interactive else plan.batch_tokens
    body = {
        "model": plan.model,
        # Its number comes first, so that no prompt finds another's prefix.
        "prompt": " ".join([f"{kind} {i}:", *("river" for _ in range(words))]),
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "service_tier": tier,
        "stream_options": {"include_usage": True},
    }
    return Ask(path="/v1/completions", body=body, max_tokens=tokens)


async def _load(
    url: str,
    plan: Plan,
    times_s: Sequence[float],
    interactive_tier: str,
    batch_tier: str | None,
    over_s: float,
) -> Part:
    """Interactive arrivals, with batch callers from a moment before to the end."""
    server = Server(url)
    done: list[StreamResult] = []
    ending = asyncio.Event()
    callers: list[asyncio.Task[None]] = []
    if batch_tier is not None:
        callers = [
            asyncio.ensure_future(_caller(server, plan, batch_tier, i, done, ending))
            for i in range(plan.batch_callers)
        ]
        await asyncio.sleep(1.0)  # every slot is taken
    try:
        await server.warm(plan.slots)
        began_s = time.monotonic()
        pause = asyncio.ensure_future(asyncio.sleep(over_s))
        asks = [ask_of(plan, INTERACTIVE, interactive_tier, i) for i in range(len(times_s))]
        results = await at_times(server, asks, times_s)
        await pause
        ended_s = time.monotonic()
        # The last answers are waited for: what came of them before the end counts.
        ending.set()
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            caller.cancel()
        server.close()
    return Part(results, tokens_between(done, began_s, ended_s), ended_s - began_s)


def tokens_between(results: Sequence[StreamResult], began_s: float, ended_s: float) -> int:
    """Tokens of batch answers that came within a time. Several of one read came together."""
    total = 0.0
    for result in results:
        inside = sum(began_s <= at <= ended_s for at in result.arrivals_s)
        if inside:
            total += tokens_of(result) * inside / len(result.arrivals_s)
    return round(total)


async def _caller(
    server: Target,
    plan: Plan,
    tier: str,
    number: int,
    done: list[StreamResult],
    ending: asyncio.Event,
) -> None:
    """One answer after the other until the end. Raises ClusterError if one fails."""
    i = 0
    while not ending.is_set():
        result = await server.ask(ask_of(plan, BATCH, tier, 10_000 * number + i))
        if result.refused_s is not None:
            await asyncio.sleep(0.2)
        elif result.error is not None:
            raise ClusterError(f"a batch request failed: {result.error}")
        else:
            done.append(result)
        i += 1


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
