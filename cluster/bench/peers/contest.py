"""`tailrace bench engine --peers`: the same weights in our engine and in others, in turn.

Two kinds of sides. Servers are asked over HTTP by the same client; tools of llama.cpp and our
engine alone run without one. In each round every side has its turn, in the next in reverse order,
so that a machine whose speed drifts is unkind to all; figures are compared round by round.
"""

from __future__ import annotations

import copy
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import config as configuration
from cluster.bench.cpu import Bystanders
from cluster.bench.engine import RATES
from cluster.bench.peers import offline
from cluster.bench.peers.forms import Forms
from cluster.bench.peers.served import TRAFFIC_CALLERS, ServedBench
from cluster.bench.summary import significant
from cluster.compare.edits import MODEL_BUILDER, Edit, applications, edited, rechecked
from cluster.compare.peers import PeerOptions, peer_side
from cluster.compare.ready import Variant
from cluster.compare.sides import ConfigSide, Side
from cluster.config import ServeConfig
from engine.errors import ConfigError
from engine.text.text_model import load_text

Say = Callable[[str], None]
Rows = dict[str, dict[str, list[float]]]
"""By side, by figure: one value a round."""

OURS = "tailrace"
SERVED_PEERS = ("vllm", "llama.cpp", "transformers")
TRAFFIC = ("requests_per_s", "itl_p99_ms")
_CONTEXT = 2048
_TRAFFIC_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    rounds: int = 5
    threads: int = 2
    traffic_requests: int = 48
    """To find the most requests a second. 0: traffic is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A side without a server."""

    name: str
    run: Callable[[], dict[str, float]]


@dataclass(slots=True)
class Results:
    """What the rounds brought."""

    served: Rows = field(default_factory=Rows)
    offline: Rows = field(default_factory=Rows)
    described: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    shares: list[float] = field(default_factory=list[float])
    """Of the CPUs that others took, a turn each, as far as that can be told."""


def bench_peers(
    forms: Forms,
    peers: Sequence[str],
    bins: Mapping[str, Path],
    effort: Effort,
    say: Say,
) -> dict[str, Any]:
    """All sides, all rounds; `bins` are directories of programs by peer.

    Raises:
        ConfigError: a peer is not known or not installed.
        ClusterError: one does not start or answer.
    """
    results = Results()
    servers = _servers(forms, peers, bins, effort)
    tools = _tools(forms, peers, bins, effort)
    results.described = [side.describe() for side in servers]
    vocab = load_text(str(forms.gguf("bf16"))).tokenizer.vocab_size
    _serve_in_turn(servers, results, vocab, effort, say)
    _run_in_turn(tools, results.offline, effort.rounds, say)
    return to_json(results)


def to_json(results: Results) -> dict[str, Any]:
    """Flat keys `ratio.<peer>.<figure>`: ours over theirs, median of the rounds."""
    out: dict[str, Any] = {}
    for name, rows in results.served.items():
        if name != OURS:
            peer = name.replace(".", "_")
            out |= _ratios(f"ratio.{peer}", results.served[OURS], rows)
    for name, rows in results.offline.items():
        if not name.startswith(OURS):
            own = results.offline[_ours_for(name)]
            out |= _ratios(f"ratio.{name.replace('.', '_')}", own, rows)
    medians = {
        kind: {
            side: {name: significant(statistics.median(values)) for name, values in rows.items()}
            for side, rows in part.items()
        }
        for kind, part in (("served", results.served), ("offline", results.offline))
    }
    rounds = {
        kind: {
            side: {name: [significant(v) for v in values] for name, values in rows.items()}
            for side, rows in part.items()
        }
        for kind, part in (("served", results.served), ("offline", results.offline))
    }
    return {
        **out,
        "others_cpu_share": significant(max(results.shares, default=0.0)),
        "medians": medians,
        "rounds": rounds,
        "sides": results.described,
    }


def _ratios(
    prefix: str, ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]]
) -> dict[str, float]:
    return {
        f"{prefix}.{name}": significant(
            statistics.median(a / b for a, b in zip(ours[name], values, strict=True))
        )
        for name, values in theirs.items()
        if name in ours
    }


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[str, int]]:
    """Who is measured how often in one go: A B, B A, A B as A, B twice, A twice, B."""
    order = itertools.chain.from_iterable(
        names if number % 2 == 0 else reversed(names) for number in range(rounds)
    )
    for name, turns in itertools.groupby(order):
        yield name, len(list(turns))


# Servers


def _servers(
    forms: Forms, peers: Sequence[str], bins: Mapping[str, Path], effort: Effort
) -> list[Side]:
    config = served_config(forms, effort.threads)
    sides: list[Side] = []
    for peer in peers:
        if peer not in SERVED_PEERS:
            raise ConfigError(f"--peers {peer!r}: there are {', '.join(SERVED_PEERS)}")
        model = forms.gguf("bf16") if peer == "llama.cpp" else forms.safetensors
        # As many at once as the traffic has callers: its own default is fewer than we take.
        slots = str(TRAFFIC_CALLERS)
        context = str(TRAFFIC_CALLERS * _CONTEXT)
        # A kept-open connection has one of its HTTP threads for itself.
        more = ("-np", slots, "-c", context, "--threads-http", str(2 * TRAFFIC_CALLERS))
        options = PeerOptions(
            bin=bins.get(peer), model=str(model), arguments=more if peer == "llama.cpp" else ()
        )
        sides.append(peer_side(peer, config, options))
    # vLLM first: it sets the pace of the open traffic.
    sides.sort(key=lambda side: SERVED_PEERS.index(side.name))
    changes = ("one replica serves whole requests",)
    return [*sides, ConfigSide(Variant(name=OURS, config=config, changes=changes))]


def served_config(forms: Forms, threads: int) -> ServeConfig:
    """The packaged configuration with this model on one replica and without a prefill pool."""
    packaged = configuration.load(None)
    data = copy.deepcopy(packaged.data)
    for application in applications(data, MODEL_BUILDER):
        application["args"]["prefill"] = False
        application["deployments"] = [
            each for each in application["deployments"] if each["name"] != "Prefill"
        ]
    together = rechecked(packaged, data, label="one replica")
    edits = [
        Edit(path="args.source", value=str(forms.gguf("bf16"))),
        Edit(path="args.dtype", value="bfloat16"),
        Edit(path="args.num_threads", value=threads),
        Edit(path="args.max_context_tokens", value=_CONTEXT),
    ]
    return edited(together, edits, label="for its peers")


def _serve_in_turn(
    sides: Sequence[Side], results: Results, vocab: int, effort: Effort, say: Say
) -> None:
    by_name = {side.name: side for side in sides}
    pace: list[float] = []
    turn, last = 0, len(sides) * effort.rounds
    for name, turns in in_turn(list(by_name), effort.rounds):
        with _asked(by_name[name], vocab, results.shares, say) as bench:
            for _ in range(turns):
                turn += 1
                say(f"served, turn {turn} of {last}: {name}")
                figures = bench.figures()
                if effort.traffic_requests:
                    figures |= _traffic(bench, pace, effort)
                _note(results.served, name, figures, say)


def _traffic(bench: ServedBench, pace: list[float], effort: Effort) -> dict[str, float]:
    """The most it finishes, and how even its streams are at half of what the first side finished in
    its first turn: one rate for all sides and rounds."""
    capacity = bench.capacity(effort.traffic_requests)
    if not pace:
        pace.append(capacity)
    gap_s = bench.itl_p99_s(pace[0] / 2, _TRAFFIC_S)
    return {"requests_per_s": capacity, "itl_p99_ms": 1000 * gap_s}


@contextmanager
def _asked(side: Side, vocab: int, shares: list[float], say: Say) -> Iterator[ServedBench]:
    import httpx

    with side.serving(say) as served:
        url = served.url.rstrip("/")
        listed = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()
        model = listed["data"][0]["id"]
        with ServedBench(url, model, vocab, random.Random(0)) as bench:
            bench.warm()
            ours = [*served.processes(), bench.process]
            bystanders = Bystanders(lambda: ours)
            yield bench
            shares.append(bystanders.share())
            say(f"{side.name}: others took {100 * shares[-1]:.0f} % of the machine meanwhile")


# Without a server


def _tools(
    forms: Forms, peers: Sequence[str], bins: Mapping[str, Path], effort: Effort
) -> list[Tool]:
    if "llama.cpp" not in peers:
        return []
    threads = effort.threads
    llama = offline.LlamaTools(PeerOptions(bin=bins.get("llama.cpp")), threads)

    def ours(kind: str, quantisation: str) -> Callable[[], dict[str, float]]:
        file = forms.gguf(kind)
        return lambda: offline.ours(file, quantisation=quantisation, group=None, threads=threads)

    def theirs(kind: str) -> Callable[[], dict[str, float]]:
        return lambda: llama.figures(forms.gguf(kind))

    return [
        Tool(name=f"{OURS}.bf16", run=ours("bf16", "none")),
        Tool(name="llama.cpp.bf16", run=theirs("bf16")),
        Tool(name=f"{OURS}.q8_0", run=ours("q8_0", "keep")),
        Tool(name="llama.cpp.q8_0", run=theirs("q8_0")),
        Tool(name=f"{OURS}.q4_0", run=ours("q4_0", "keep")),
        Tool(name="llama.cpp.q4_0", run=theirs("q4_0")),
    ]


def _ours_for(peer: str) -> str:
    return f"{OURS}.{peer.rsplit('.', 1)[-1]}"


def _run_in_turn(tools: Sequence[Tool], rows: Rows, rounds: int, say: Say) -> None:
    by_name = {tool.name: tool for tool in tools}
    turn, last = 0, len(tools) * rounds
    for name, turns in in_turn(list(by_name), rounds):
        for _ in range(turns):
            turn += 1
            say(f"alone, turn {turn} of {last}: {name}")
            _note(rows, name, by_name[name].run(), say)


def _note(rows: Rows, name: str, figures: Mapping[str, float], say: Say) -> None:
    of = rows.setdefault(name, {})
    for figure, value in figures.items():
        of.setdefault(figure, []).append(value)
    told = "  ".join(f"{figures[each]:.0f}" for each in RATES)
    more = "".join(f"  {each} {figures[each]:.2f}" for each in TRAFFIC if each in figures)
    say(f"{name:16} prefill, batch 1, batch 16: {told} tokens/s{more}")
