"""Measures one engine in a process of its own: `python -m cluster.bench.engine_worker`.

Takes an `EngineJob` as JSON on standard input, prints one JSON object. Imports torch.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.build import BuiltEngine
    from engine.models.model import Model

DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 128
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What to measure. Times are `time.monotonic()`, which processes of one host share."""

    source: str
    dtype: str
    threads: int
    repeats: int
    """0: only the start-up."""

    spawned_s: float
    quantisation: str = "keep"
    quantisation_group: int | None = None
    kv_dtype: str = "auto"
    max_chunk_tokens: int | None = None
    """None: the engine's own default."""

    prefill_tokens: int = PREFILL_TOKENS
    decode_prompt_tokens: int = DECODE_PROMPT_TOKENS
    decode_tokens: int = DECODE_TOKENS
    batches: tuple[int, ...] = (1, 16)
    rates_only: bool = False
    """Neither the limit of the linear layers nor what a step costs beside the model's pass."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineJob:
        values = json.loads(text)
        return cls(**{**values, "batches": tuple(values["batches"])})


def measure(job: EngineJob) -> dict[str, Any]:
    """Build the engine and run what the job asks for.

    Rates of the model and of its linear layers alone are taken in turn, so that a machine whose
    speed drifts is equally unkind to both.
    """
    built = _build(job)
    startup_s = time.monotonic() - job.spawned_s
    out: dict[str, Any] = {"startup_s": startup_s}
    if job.repeats == 0:
        return out
    import torch

    from cluster.bench.cpu import Bystanders

    bystanders = Bystanders(list)
    model = _own(built)
    limit = None if job.rates_only else _linear_layers(model)
    bench = _Bench(built, limit, random.Random(0))
    bench.prefill(job.prefill_tokens)
    for batch in job.batches:
        bench.decode(batch, job.decode_prompt_tokens, 8)
    rates: dict[str, list[float]] = {}
    for _ in range(job.repeats):
        bench.take(
            rates, f"prefill_{job.prefill_tokens}", lambda: bench.prefill(job.prefill_tokens)
        )
        for batch in job.batches:
            bench.take(
                rates,
                f"decode_{batch}",
                lambda batch=batch: bench.decode(
                    batch, job.decode_prompt_tokens, job.decode_tokens
                ),
            )
    overheads: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for _ in range(0 if job.rates_only else job.repeats):
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            overheads[name].append(
                bench.overhead(
                    max(job.batches), job.decode_prompt_tokens, job.decode_tokens, temperature
                )
            )
    out["step_overhead"] = {name: statistics.median(v) for name, v in overheads.items() if v}
    gains: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for number in range(0 if job.rates_only else job.repeats):
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            gains[name].append(
                bench.overlap_gain(
                    max(job.batches),
                    job.decode_prompt_tokens,
                    job.decode_tokens,
                    temperature,
                    first=number % 2 == 0,
                )
            )
    out["overlap_gain"] = {name: statistics.median(v) for name, v in gains.items() if v}
    out["overlap_gain_samples"] = {name: v for name, v in gains.items() if v}
    built.engine.check()
    out["others_cpu_share"] = bystanders.share()
    out["samples"] = rates
    for name, values in rates.items():
        out[name] = statistics.median(values)
    out["dtype"] = model.dtype
    out["kv_dtype"] = model.layout.dtype
    out["decode_context_tokens"] = job.decode_prompt_tokens
    out["kv_bytes_per_token"] = model.layout.bytes_per_token
    out["num_threads"] = torch.get_num_threads()
    out["torch"] = torch.__version__
    capabilities = torch.cpu.get_capabilities()
    out["cpu_flags"] = sorted(name for name, present in capabilities.items() if present is True)
    out["max_chunk_tokens"] = built.engine.config.scheduler.max_chunk_tokens
    return out


def _own(built: BuiltEngine) -> Model:
    from engine.build import RankedModel

    assert not isinstance(built.model, RankedModel), "this engine computes in this process"
    return built.model


def _build(job: EngineJob) -> BuiltEngine:
    from engine.build import build_engine
    from engine.config import EngineConfig, ModelConfig, SchedulerConfig
    from engine.text.text_model import load_text

    scheduler = SchedulerConfig()
    if job.max_chunk_tokens is not None:
        scheduler = SchedulerConfig(
            max_chunk_tokens=job.max_chunk_tokens,
            max_step_tokens=max(job.max_chunk_tokens, scheduler.max_step_tokens),
        )
    config = EngineConfig(
        model=ModelConfig(
            name="bench",
            source=job.source,
            dtype=job.dtype,  # pyright: ignore[reportArgumentType]
            quantisation=job.quantisation,  # pyright: ignore[reportArgumentType]
            quantisation_group=job.quantisation_group,
            kv_dtype=job.kv_dtype,  # pyright: ignore[reportArgumentType]
        ),
        scheduler=scheduler,
        num_threads=job.threads,
    )
    if job.decode_prompt_tokens > DECODE_PROMPT_TOKENS:
        # As many blocks as a batch needs, however large they are.
        tokens = job.decode_prompt_tokens + job.decode_tokens
        blocks = max(job.batches) * (-(-tokens // config.block_tokens) + 1) + 1
        config = replace(config, num_blocks=blocks)
    return build_engine(config, load_text(job.source).tokenizer)


Limit = Callable[[int, int], None]
"""Runs the linear layers of a pass over so many rows, of which so many are sampled from."""


def _linear_layers(model: Model) -> Limit | None:
    """The model's linear layers as it executes them. None for a model without any."""
    import torch

    from engine.models.decoder import Decoder
    from engine.native.decoder import NativeDecoder

    if isinstance(model, NativeDecoder):
        return model.products
    if isinstance(model, Decoder):
        from cluster.bench.limit import LinearLayers

        return LinearLayers(model.architecture, getattr(torch, model.dtype)).run
    return None


class _Bench:
    """Drives one engine's steps on this thread."""

    def __init__(self, built: BuiltEngine, limit: Limit | None, rng: random.Random) -> None:
        self._engine = built.engine
        self._model = _own(built)
        self._limit = limit
        self._rng = rng
        self._count = 0
        self._passes: list[tuple[int, int]] = []
        """`(rows, sampled)` of the passes that the last measurement timed."""

    def take(self, rates: dict[str, list[float]], name: str, measured: Any) -> None:
        """One measurement, and the same passes through the linear layers alone."""
        num_tokens, seconds = measured()
        rates.setdefault(f"{name}_tok_s", []).append(num_tokens / seconds)
        if self._limit is None:
            return
        for rows, sampled in set(self._passes):
            self._limit(rows, sampled)
        started = time.perf_counter()
        for rows, sampled in self._passes:
            self._limit(rows, sampled)
        limit_s = time.perf_counter() - started
        rates.setdefault(f"{name}_tok_s_limit", []).append(num_tokens / limit_s)

    def prefill(self, num_tokens: int) -> tuple[int, float]:
        """Tokens of one prompt that nobody has seen, and the seconds until its first token."""
        self._passes = []
        self._submit(self._prompt(num_tokens), max_tokens=1)
        started = time.perf_counter()
        finished = 0
        while not finished:
            finished = self._step()
        return num_tokens, time.perf_counter() - started

    def decode(self, batch: int, prompt_tokens: int, max_tokens: int) -> tuple[int, float]:
        """Tokens that come after everyone's first, and the seconds they take."""
        self._begin(batch, prompt_tokens, max_tokens)
        self._passes = []
        started = time.perf_counter()
        num_tokens, finished = 0, 0
        while finished < batch:
            step = self._engine.step()
            assert step is not None, "the engine stopped in the middle of a batch"
            num_tokens += len(step.outputs)
            finished += sum(output.finish is not None for output in step.outputs)
            self._passes.append((step.num_tokens, len(step.outputs)))
        return num_tokens, time.perf_counter() - started

    def overhead(
        self, batch: int, prompt_tokens: int, max_tokens: int, temperature: float
    ) -> float:
        """Share of decode steps that is not the model's pass: plans, inputs, samples, output."""
        model, inside = self._model, 0.0
        forward = model.forward

        def timed(*arguments: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            try:
                return forward(*arguments)
            finally:
                inside += time.perf_counter() - started

        vars(model)["forward"] = timed
        try:
            self._begin(batch, prompt_tokens, max_tokens, temperature)
            inside, finished, started = 0.0, 0, time.perf_counter()
            while finished < batch:
                finished += self._step()
            return 1 - inside / (time.perf_counter() - started)
        finally:
            del vars(model)["forward"]

    def overlap_gain(
        self, batch: int, prompt_tokens: int, max_tokens: int, temperature: float, *, first: bool
    ) -> float:
        """Decoding speed with overlap over that without, one after the other.

        first: overlap takes the first turn.
        """
        engine, seconds = self._engine, dict[bool, float]()
        limits = engine.config.scheduler
        try:
            for overlap in (first, not first):
                engine.reconfigure(replace(limits, overlap=overlap))
                self._begin(batch, prompt_tokens, max_tokens, temperature)
                finished, started = 0, time.perf_counter()
                while finished < batch:
                    finished += self._step()
                seconds[overlap] = time.perf_counter() - started
                assert engine.step() is None, "a pass without requests"
        finally:
            engine.reconfigure(limits)
        return seconds[False] / seconds[True]

    def _begin(
        self, batch: int, prompt_tokens: int, max_tokens: int, temperature: float = 0.0
    ) -> None:
        """Requests of a batch, each with its first token."""
        prompts = [self._prompt(prompt_tokens) for _ in range(batch)]
        if prompt_tokens > DECODE_PROMPT_TOKENS:
            # Computed and cached, so that none ends while prompts of others are being computed.
            for prompt in prompts:
                self._submit(prompt, max_tokens=1)
                while not self._step():
                    pass
        waiting = {
            self._submit(prompt, max_tokens=max_tokens, temperature=temperature)
            for prompt in prompts
        }
        while waiting:
            step = self._engine.step()
            assert step is not None, "the engine stopped in the middle of a batch"
            waiting -= {output.request_id for output in step.outputs}

    def _step(self) -> int:
        step = self._engine.step()
        assert step is not None, "the engine stopped in the middle of a prompt"
        self._passes.append((step.num_tokens, len(step.outputs)))
        return sum(output.finish is not None for output in step.outputs)

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        vocab = self._engine.vocab_size
        return tuple(self._rng.randrange(vocab) for _ in range(num_tokens))

    def _submit(self, prompt: tuple[int, ...], *, max_tokens: int, temperature: float = 0.0) -> str:
        from engine.request import Request, SamplingParams

        self._count += 1
        request_id = f"bench-{self._count}"
        self._engine.submit(
            Request(
                request_id=request_id,
                prompt_ids=prompt,
                params=SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, ignore_eos=True
                ),
            )
        )
        return request_id


def main() -> None:
    from engine.errors import EngineError

    job = EngineJob.from_json(sys.stdin.read())
    try:
        result = measure(job)
    except EngineError as error:
        result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
