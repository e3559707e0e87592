"""How much prompt a step may carry, from what the running streams and the waiting prompts are owed.

A fixed token budget is wrong twice: on a quiet replica it stretches the gaps of running streams for
nothing, and when first tokens are late it holds prompts back although the streams have room. Here
both targets of the requests decide (chunked prefill as in Sarathi-Serve, arXiv 2403.02310; the
budget follows the tightest inter-token target as there, and first-token deadlines besides).

- Streams come first: the step must end inside the tightest inter-token target among those that are
  computed, less a margin. Rows of less urgent tiers that would not fit sit a step out, though never
  longer than `max_skip_s`.
- What is left of the time is prompt; one that is no less urgent than the stream that sets the limit
  may use most of the margin, too.
- If at that pace a first token would be late that could still be in time, and its tier is more
  urgent than that stream, the step grows until it is in time. Within a tier it does not: to break
  one promise for another of the same kind gains nothing. Deadlines that are lost already do not
  make others late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.scheduling.cost import StepCost, StepWork

MARGIN = 0.8
"""Share of an inter-token target that a step is planned to take: the rest is for noise, sampling
and the way to the client."""

STRETCHED = 0.9
"""Share of an inter-token target that a step may take for prompts no less urgent: what is held back
from them when many wait comes back as late first tokens."""

DUE_MARGIN = 0.9
"""Share of the time to a first token that its prompt is planned to take: steps are whole."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A prompt that is not computed yet, or not whole."""

    level: int
    tokens: int
    """Still to compute."""

    due_s: float | None
    """When its first token is due, on the scheduler's clock. None: nobody waits for it."""

    first_token: int = 0
    """Tokens computed already."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A running sequence that wants its next token."""

    level: int
    itl_s: float | None
    """Its inter-token target."""

    work: StepWork
    skipped_s: float = 0.0
    """How long it was left out of steps."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the next step may hold."""

    prompt_tokens: int
    skipped: frozenset[int]
    """Positions in the given streams that sit this step out."""


def pace(
    cost: StepCost,
    streams: Sequence[Stream],
    demands: Iterable[Demand],
    *,
    now: float,
    max_prompt_tokens: int,
    min_prompt_tokens: int,
    max_skip_s: float,
    num_stages: int = 1,
) -> Pace:
    """Decide. `streams` most urgent first.

    min_prompt_tokens: what prompts get in any case, so that they are never starved by streams.
    num_stages: so many steps are under way at once, each for as long as `cost` says.
    """
    if not cost.known:
        return Pace(max_prompt_tokens, frozenset())
    limit_s, limit_level, rows, skipped = _fill(cost, streams, max_skip_s)
    if limit_s is None:
        return Pace(max_prompt_tokens, frozenset(skipped))
    wanted = sorted(demands, key=lambda d: (d.level, d.due_s is None, d.due_s or 0.0))
    if not wanted:
        return Pace(max_prompt_tokens, frozenset(skipped))
    streams_s = cost.seconds(rows)
    if wanted[0].level <= limit_level:
        limit_s *= STRETCHED / MARGIN
    allowed = cost.prompt_tokens(max(0.0, limit_s - streams_s), wanted[0].first_token)
    needed = _needed(cost, wanted, streams_s, limit_level, now, max_prompt_tokens, num_stages)
    tokens = max(allowed, needed, float(min_prompt_tokens))
    return Pace(int(min(tokens, float(max_prompt_tokens))), frozenset(skipped))


def _fill(
    cost: StepCost, streams: Sequence[Stream], max_skip_s: float
) -> tuple[float | None, int, StepWork, list[int]]:
    """The step's time limit, who set it, the rows that fit, and those that sit out."""
    limit_s: float | None = None
    limit_level = 0
    rows, skipped = StepWork(), list[int]()
    for i, stream in enumerate(streams):
        with_it = rows + stream.work
        if (
            limit_s is not None
            and stream.level > limit_level
            and stream.skipped_s < max_skip_s
            and cost.seconds(with_it) > limit_s
        ):
            skipped.append(i)
            continue
        rows = with_it
        if stream.itl_s is not None and (limit_s is None or MARGIN * stream.itl_s < limit_s):
            limit_s, limit_level = MARGIN * stream.itl_s, stream.level
    return limit_s, limit_level, rows, skipped


def _needed(
    cost: StepCost,
    wanted: Sequence[Demand],
    streams_s: float,
    limit_level: int,
    now: float,
    most: int,
    num_stages: int,
) -> float:
    """Prompt tokens a step must hold for every more urgent first token to be in time that still can
    be."""
    needed, ahead = 0.0, 0
    for demand in wanted:
        ahead += demand.tokens
        if demand.level >= limit_level or demand.due_s is None:
            continue
        slack_s = DUE_MARGIN * (demand.due_s - now)
        each_s = 1.0 / max(cost.prompt_tokens(1.0, demand.first_token), 1e-9)
        # `ahead` tokens in steps of x take ahead / x * (streams_s + x * each_s). Where n stages
        # have one each under way, an n-th of that and, for the last one to pass through the others,
        # (n - 1) / n of a step: (ahead / x + n - 1) * (streams_s + x * each_s) / n <= slack_s, of
        # which this is the lower root.
        filling = num_stages - 1
        spare_s = num_stages * slack_s - ahead * each_s - filling * streams_s
        left = spare_s * spare_s - 4 * filling * each_s * ahead * streams_s
        if spare_s <= 0 or left < 0:
            continue  # late whatever is done
        x = 2 * ahead * streams_s / (spare_s + math.sqrt(left))
        if x <= most:
            needed = max(needed, x)
    return needed
