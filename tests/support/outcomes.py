"""Outcomes for tests of figures: exact ones, and those of a simulated queue."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from typing import Any

from cluster.replay.outcome import Outcome, Result, Run, RunEnd


def outcome(index: int = 0, **changes: Any) -> Outcome:
    """Due and sent at `index` seconds; first token after 0.1 s, then one each 0.05 s, 5 in all."""
    due = float(changes.pop("scheduled_s", index))
    sent = changes.pop("sent_s", due)
    times = tuple(sent + 0.1 + 0.05 * i for i in range(5))
    values: dict[str, Any] = {
        "source": "trace",
        "attempt_s": sent,
        "first_token_s": times[0],
        "end_s": times[-1],
        "chunk_times": times,
        "planned_input_tokens": 10,
        "planned_output_tokens": 5,
        "input_tokens": 10,
        "output_tokens": 5,
        "result": "ok",
        "status": 200,
    }
    return Outcome(index=index, scheduled_s=due, sent_s=sent, **{**values, **changes})


def failed(index: int, result: Result, **changes: Any) -> Outcome:
    """Nothing came but a refusal, 0.01 s after it was sent."""
    due = float(changes.pop("scheduled_s", index))
    nothing = {"first_token_s": None, "chunk_times": (), "input_tokens": None}
    values = {"end_s": due + 0.01, "output_tokens": None, "result": result, "status": 503}
    return outcome(index, scheduled_s=due, **{**nothing, **values, **changes})


def run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "label": "run",
        "started_at": "2026-01-02T03:04:05+00:00",
        "url": "http://127.0.0.1:1",
        "endpoint": "chat",
        "seed": 1,
        "end": RunEnd(duration_s=10.0, num_outcomes=0, client_cpu_s=1.0),
    }
    return Run(**{**values, **changes})


def simulated(
    num_requests: int,
    *,
    rate: float,
    slots: int = 8,
    speed: float = 1.0,
    seed: int = 1,
    tiers: Mapping[str, float] | None = None,
    patience_s: float = 8.0,
) -> list[Outcome]:
    """A queue before `slots` servers: who waits longer than the patience is shed."""
    rng = random.Random(seed)
    tiers = tiers or {"default": 1.0}
    free = [0.0] * slots
    now = 0.0
    out: list[Outcome] = []
    for index in range(num_requests):
        now += rng.expovariate(rate)
        tier = rng.choices(list(tiers), list(tiers.values()))[0]
        due, sent = now, now + rng.expovariate(2000)
        tokens_in, tokens_out = rng.randint(20, 800), rng.randint(8, 100)
        begin = max(sent + 0.002, heapq.heappop(free))
        if begin - sent > patience_s:
            heapq.heappush(free, begin)
            out.append(failed(index, "shed", scheduled_s=due, code="overloaded", tier=tier))
            continue
        prefill = speed * tokens_in / 2000
        first = begin + prefill
        times = [first]
        for _ in range(tokens_out - 1):
            stall = 0.3 if rng.random() < 0.005 else 0.0
            times.append(times[-1] + speed * rng.gauss(0.03, 0.003) + stall)
        heapq.heappush(free, times[-1])
        out.append(
            outcome(
                index,
                scheduled_s=due,
                sent_s=sent,
                tier=tier,
                tenant=rng.choice(["north", "south"]),
                first_token_s=first,
                chunk_times=tuple(times),
                end_s=times[-1] + 0.001,
                planned_input_tokens=tokens_in,
                planned_output_tokens=tokens_out,
                input_tokens=tokens_in,
                output_tokens=tokens_out,
                cached_tokens=16 * rng.randint(0, tokens_in // 32),
                predicted_cached_tokens=16 * (tokens_in // 64),
                phases={"tokenize": 0.002, "queue": begin - sent - 0.002, "prefill": prefill},
            )
        )
    return out
