"""What `tailrace bench tiers` offers: a trace's lengths and gaps, or fixed ones and Poisson."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.bench.loads import poisson_times
from cluster.bench.summary import significant
from cluster.errors import ClusterError
from cluster.replay.formats import read_trace
from cluster.replay.trace import Trace, TraceError

SAMPLE: Final = Path(__file__).parents[2] / "tests" / "traces" / "azure2023_conv.jsonl"
"""Chat of the Azure Public Dataset: what `tailrace replay` is shown with."""

NO_TRACE: Final = "none"


@dataclass(frozen=True, slots=True)
class Size:
    """One request."""

    prompt: int
    """Tokens of its prompt, about: one a word, and those that tell it from all others."""

    tokens: int
    """Of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What requests of one kind are: all alike without a trace, else scaled from its lengths."""

    fixed: Size
    factor: float
    """Times the lengths of the trace, prompt and answer alike: a model on two cores is not what
    the trace was served by."""

    def scaled(self, input_tokens: int, output_tokens: int) -> Size:
        return Size(
            max(1, round(self.factor * input_tokens)), max(1, round(self.factor * output_tokens))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Every request that will be made, before any is."""

    trace: Trace | None
    times_s: tuple[float, ...]
    """When each interactive request is due, the first at 0 or soon after."""

    interactive: tuple[Size, ...]
    """As many."""

    batch: tuple[Size, ...]
    """Taken round and round."""

    def told(self) -> dict[str, Any]:
        """For the plan."""
        return {
            "arrivals": "poisson" if self.trace is None else "trace",
            "trace": None if self.trace is None else self.trace.name,
            "trace_sha256": None if self.trace is None else self.trace.sha256,
            "over_s": significant(self.times_s[-1]),
            "interactive": _told(self.interactive),
            "batch": _told(self.batch),
        }


def traffic(
    trace: Trace | None, *, rate: float, samples: int, interactive: Kind, batch: Kind
) -> Traffic:
    """`samples` interactive arrivals at a mean of `rate` a second, and what batch callers ask for.

    Of a trace, arrivals keep the proportions of their gaps, and each request its own lengths; the
    trace is repeated as often as it takes. Batch takes the same lengths in another order, by its
    own factor. So both ask for prompt and answer in the same proportion, and a token of either
    stands for as much work: without that, what one leaves to the other could not be said in tokens.

    Raises TraceError for a trace that has no arrivals.
    """
    if trace is None:
        times = poisson_times(rate, 2 * samples / rate + 10, random.Random(1))[:samples]
        return Traffic(
            trace=None,
            times_s=tuple(times),
            interactive=(interactive.fixed,) * samples,
            batch=(batch.fixed,),
        )
    if not trace.has_arrivals:
        raise TraceError(
            f"{trace.path}: lengths without arrivals: give a trace that has times, or --trace none"
        )
    rows = trace.repeated(math.ceil(samples / len(trace.requests))).requests[:samples]
    first_s, last_s = rows[0].at_s or 0.0, rows[-1].at_s or 0.0
    # Of the rows that are sent: a part of a trace has a rate of its own.
    faster = (samples - 1) / rate / (last_s - first_s) if last_s > first_s else 1.0
    lengths = [batch.scaled(row.input_tokens, row.output_tokens) for row in trace.requests]
    random.Random(2).shuffle(lengths)
    return Traffic(
        trace=trace,
        times_s=tuple(((row.at_s or 0.0) - first_s) * faster for row in rows),
        interactive=tuple(interactive.scaled(r.input_tokens, r.output_tokens) for r in rows),
        batch=tuple(lengths),
    )


def chosen_trace(option: str | None) -> Trace | None:
    """What `--trace` names: a file, `none`, or the sample where it is left out.

    Raises ClusterError where there is no sample, or the file cannot be read.
    """
    if option == NO_TRACE:
        return None
    if option is None and not SAMPLE.exists():
        raise ClusterError(
            f"{SAMPLE}: no sample of a trace is beside this installation: give --trace FILE (what "
            "`tailrace replay` reads), or --trace none"
        )
    return read_trace(SAMPLE if option is None else Path(option))


def _told(sizes: Sequence[Size]) -> dict[str, Any]:
    return {
        "prompt_mean": significant(statistics.mean(size.prompt for size in sizes)),
        "prompt_most": max(size.prompt for size in sizes),
        "tokens_mean": significant(statistics.mean(size.tokens for size in sizes)),
        "tokens_most": max(size.tokens for size in sizes),
    }
