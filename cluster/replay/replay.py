"""One replay from beginning to end: what to offer, to whom, and what came of it."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from cluster.errors import ClusterError
from cluster.replay import origin
from cluster.replay.load import Endpoint, Load, Patience, Prompts, Target
from cluster.replay.mix import Part
from cluster.replay.outcome import Outcome, ResultWriter, Run, RunEnd
from cluster.replay.progress import Progress
from cluster.replay.prompts import PromptWriter
from cluster.replay.server import ServedModel, Server
from cluster.replay.trace import Trace
from cluster.replay.vocabulary import (
    ChatFrame,
    LocalTokeniser,
    ServedTokeniser,
    Vocabulary,
    discover,
)
from cluster.replay.workload import Factors, Schedule, plan
from engine.errors import ConfigError

Say = Callable[[str], None]

EVERY_S = 1.0
"""Between two lines of progress on a terminal; ten times as long in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to replay, apart from where."""

    traces: tuple[Trace, ...]
    mix: tuple[Part, ...]
    factors: Factors = field(default_factory=Factors)
    patience: Patience = field(default_factory=Patience)
    endpoint: Endpoint = "chat"
    prompts: Prompts = "text"
    stream: bool = True
    count_tokens: bool = False
    model: str | None = None
    """For parts of the mix that name none."""

    tokenizer: str | None = None
    """A folder with `tokenizer.json` or a model source, for servers without `/tokenize`."""

    label: str = ""

    def __post_init__(self) -> None:
        if self.prompts == "ids" and self.endpoint != "completions":
            raise ConfigError("--prompts ids: only --endpoint completions takes token ids")
        if self.prompts == "ids" and any(part.turns > 1 for part in self.mix):
            raise ConfigError("--prompts ids: conversations carry text; use --prompts text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A spec and a server, put together: nothing is left to ask."""

    run: Run
    schedule: Schedule
    target: Target
    writers: Mapping[str, PromptWriter]
    """By model."""

    patience: Patience


def prepare(
    spec: Spec,
    url: str,
    *,
    api_key: str | None = None,
    keys: Mapping[str, str] | None = None,
) -> Prepared:
    """Ask the server for its models and tokens, and make the schedule.

    Raises:
        NotRunning: nobody answers at `url`.
        ClusterError, ConfigError, TraceError: what was asked does not go together.
    """
    server = Server(url, api_key=api_key or next(iter((keys or {}).values()), None))
    try:
        served = _chosen_first(server.models(), spec.model)
        vocabularies = _vocabularies(spec, server, served)
    finally:
        server.close()
    applications = origin.own_applications(server.url)
    factors = spec.factors
    if factors.block_tokens == 1 and (block := origin.cache_block_tokens(applications)):
        factors = replace(factors, block_tokens=block)
    frames = {
        name: vocabulary.chat if vocabulary and spec.endpoint == "chat" else None
        for name, vocabulary in vocabularies.items()
    }
    schedule = plan(spec.traces, spec.mix, factors, served, frames)
    target = Target(
        url=server.url,
        endpoint=spec.endpoint,
        prompts=spec.prompts,
        stream=spec.stream,
        count_tokens=spec.count_tokens,
        api_key=api_key,
        keys=keys or {},
        run_id=f"replay-{secrets.token_hex(4)}",
    )
    used = {offer.model for offer in schedule.offers}
    run = Run(
        label=spec.label or "+".join(trace.name for trace in spec.traces),
        started_at=_now(),
        url=server.url,
        endpoint=spec.endpoint,
        stream=spec.stream,
        seed=factors.seed,
        sources=tuple(asdict(source) for source in schedule.sources),
        mix=tuple(part.model_dump() for part in spec.mix),
        length_factor=factors.length,
        time_factor=_common(schedule),
        rate=schedule.rate,
        loop="closed" if schedule.users else "open",
        settings=_settings(spec, factors, frames),
        num_requests=len(schedule.offers),
        server={
            "software": server.software,
            "models": [asdict(model) for model in served if model.name in used],
            "applications": applications,
        },
        versions=origin.versions(),
        machine=origin.machine(),
        command=origin.command(),
    )
    return Prepared(
        run=run,
        schedule=schedule,
        target=target,
        writers={
            name: PromptWriter(vocabulary, factors.seed)
            for name, vocabulary in vocabularies.items()
        },
        patience=spec.patience,
    )


def offer(
    prepared: Prepared, *, raw: IO[bytes] | None = None, say: Say | None = None
) -> tuple[Run, list[Outcome]]:
    """Offer the schedule and wait for what comes of it; Ctrl-C ends it early.

    Every outcome is written to `raw` as it comes. The run that is returned has its end; outcomes
    are in order of the schedule.
    """
    run = replace(prepared.run, started_at=_now())
    writer = ResultWriter(raw, run) if raw is not None else None
    progress = Progress(run.num_requests)
    outcomes: list[Outcome] = []

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        progress.add(outcome)
        if writer is not None:
            writer.outcome(outcome)

    load = Load(
        prepared.schedule,
        prepared.target,
        prepared.writers,
        prepared.patience,
        on_outcome,
        seed=run.seed,
    )
    waited_s = origin.cpu_wait_s()
    whole = asyncio.run(_run(load, progress, say))
    waited_until_s = origin.cpu_wait_s()
    end = RunEnd(
        duration_s=max((outcome.end_s for outcome in outcomes), default=0.0),
        num_outcomes=len(outcomes),
        interrupted=not whole,
        num_unfinished=run.num_requests - len(outcomes),
        client_cpu_s=load.cpu_s,
        client_wait_s=(
            None if waited_s is None or waited_until_s is None else waited_until_s - waited_s
        ),
    )
    if writer is not None:
        writer.end(end)
    outcomes.sort(key=lambda outcome: outcome.index)
    return replace(run, end=end), outcomes


async def _run(load: Load, progress: Progress, say: Say | None) -> bool:
    loop = asyncio.get_running_loop()
    # Only the main thread may take signals over; elsewhere the caller does what it likes.
    ours = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if ours else ()
    for number in numbers:
        loop.add_signal_handler(number, load.stop)
    telling = None if say is None else asyncio.create_task(_tell(load, progress, say))
    try:
        return await load.run()
    finally:
        if telling is not None:
            telling.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)


async def _tell(load: Load, progress: Progress, say: Say) -> None:
    every_s = EVERY_S if sys.stderr.isatty() else 10 * EVERY_S
    while True:
        await asyncio.sleep(every_s)
        if load.began_s:
            say(progress.line(load.now_s, load.num_sent, load.in_flight))


def _chosen_first(models: list[ServedModel], wanted: str | None) -> list[ServedModel]:
    if wanted is None:
        return models
    if wanted not in {model.name for model in models}:
        raise ConfigError(
            f"--model {wanted!r} is not served; there are "
            f"{', '.join(model.name for model in models)}"
        )
    return sorted(models, key=lambda model: model.name != wanted)


def _vocabularies(
    spec: Spec, server: Server, served: Sequence[ServedModel]
) -> dict[str, Vocabulary | None]:
    """Of the models that the replay may use."""
    wanted = {served[0].name, *(part.model for part in spec.mix if part.model)}
    wanted |= {request.model for trace in spec.traces for request in trace.requests} - {None}
    found: dict[str, Vocabulary | None] = {}
    for model in served:
        if model.name not in wanted:
            continue
        tokeniser = (
            LocalTokeniser(spec.tokenizer)
            if spec.tokenizer
            else ServedTokeniser(server, model.name)
        )
        found[model.name] = discover(tokeniser)
        if found[model.name] is None and spec.prompts == "text":
            raise ClusterError(
                f"{server.url} has no /tokenize, so that no text of a given number of tokens can "
                f"be made for {model.name}: give --tokenizer FOLDER, or --endpoint completions "
                "--prompts ids"
            )
    return found


def _common(schedule: Schedule) -> float | None:
    """The time factor, where all sources have the same."""
    factors = {source.time_factor for source in schedule.sources}
    return factors.pop() if len(factors) == 1 else None


def _settings(
    spec: Spec, factors: Factors, frames: Mapping[str, ChatFrame | None]
) -> dict[str, object]:
    settings = asdict(factors)
    for name in ("length", "time", "seed"):
        del settings[name]
    return {
        **settings,
        "prompts": spec.prompts,
        "timeout_s": spec.patience.timeout_s,
        "max_retries": spec.patience.retry.max_retries,
        "tokenizer": spec.tokenizer,
        "chat_frames": {name: asdict(frame) for name, frame in frames.items() if frame},
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def open_raw(directory: Path) -> IO[bytes]:
    """`outcomes.jsonl` in `directory`, which is made. Raises ClusterError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / RAW_FILE).open("wb", buffering=256 * 1024)
    except OSError as error:
        raise ClusterError(f"--out {directory}: {error.strerror}; give another directory") from None


RAW_FILE = "outcomes.jsonl"
