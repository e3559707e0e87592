"""`tailrace verify`: the cluster says what one engine alone would say, and moves KV unchanged.

A set of prompts goes through the cluster's API and through one engine of the same weights,
arithmetic and threads in this process. Two demands:

- Every block of a prompt that prefill computed holds the same bytes on the decode replica.
- Greedy tokens are equal. float64 must agree to the last one, drawn tokens included. With fewer
  bits a pass over other row counts rounds differently, so the cluster may take another token where
  the engine, asked with the same history, finds the two closer than a stated tolerance; from there
  the engine goes on from what the cluster said, so that every token is judged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click
import httpx

from cluster.cli import emit, json_option, say
from cluster.errors import ClusterError, NotRunning
from engine.errors import RequestError
from engine.request import Request, SampledToken, SamplingParams
from engine.text.text_model import TextModel, load_text

if TYPE_CHECKING:
    from cluster.bench.stack import ServedModel, Stack
    from engine.build import BuiltEngine

TOLERANCE: Mapping[str, float] = {"float64": 0.0, "float32": 1e-3, "bfloat16": 0.25}
"""Largest distance, in logits, of the cluster's token from the engine's own choice.

bfloat16 has 8 bits: hidden states of unequal passes differ by a few steps in the last of them, and
logits of a range of 25 then by up to a quarter.
"""

TOP = 20
"""Candidates the engine tells of at each position: the API's own limit."""

SEED = 7


class VerifyFailed(ClusterError):
    """The cluster said or moved something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt: a text, or messages for the chat template."""

    name: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    max_tokens: int = 32
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Fork:
    """A position where the cluster took another token than the engine."""

    at: int
    """0 is the first token of the answer."""

    margin: float
    """How much more likely the engine finds its own choice, in logits."""

    allowed: bool


@dataclass(slots=True)
class Verdict:
    """What became of one case."""

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    route: str | None = None
    """As the decode replica decided; None where it cannot be asked."""

    forks: list[Fork] = field(default_factory=list[Fork])
    num_blocks: int | None = None
    """KV blocks compared; None where none crossed from prefill to decode."""

    max_logprob_difference: float = 0.0
    """Between cluster and engine, over the tokens both took."""

    failures: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        return not self.failures


_SENTENCES = (
    "The river rises in the hills and reaches the sea after three hundred kilometres.",
    "Every morning the baker opens the shop at six and sells bread until noon.",
    "A train left the station with two hundred passengers on board.",
    "Water boils at one hundred degrees at the level of the sea.",
    "She wrote a long letter to her brother, who lives on an island in the north.",
    "The museum shows paintings from five centuries and closes on Mondays.",
    "In winter the lake freezes, and children skate on it until spring.",
    "The engineer measured the bridge twice, because the first number looked wrong.",
    "Most birds of the forest sing early, before the sun is high.",
    "He bought apples, pears and a small basket of plums at the market.",
)
_SCRIPTS = (
    "Größe, façade, naïveté und Übermut.",
    "Привет, мир: сегодня идёт снег.",
    "東京は雨です。明日は晴れるでしょう。",
    "Καλημέρα, τι κάνεις;",
    "مرحبا بالعالم، كيف الحال؟",
    "नमस्ते दुनिया।",
    "🙂🚀 👩‍👩‍👧 e\u0301 ﬁ ½ ∑ → ≠",
)


def cases(text: TextModel, rng: random.Random, *, drawn: bool) -> list[Case]:
    """Short and long, plain and chat, sharing a prefix, in several scripts.

    What prefill is to compute begins with a number that no earlier run had: blocks that the decode
    replica already holds are its own affair.
    `drawn` adds answers at temperature 1.
    """

    def passage(sentences: Sequence[str], num_tokens: int) -> str:
        parts = [f"Text {rng.getrandbits(48):012x}."]
        while len(text.tokenizer.encode(" ".join(parts))) < num_tokens:
            parts.append(rng.choice(sentences))
        return " ".join(parts)

    shared = passage(_SENTENCES, 150)
    found = [
        Case(name="short", text="The capital of France is"),
        Case(name="short, scripts", text="Grüße: 你好, привет 🙂"),
        Case(name="long", text=passage(_SENTENCES, 200)),
        Case(name="several chunks", text=passage(_SENTENCES, 700)),
        Case(name="scripts", text=passage(_SCRIPTS, 200)),
        Case(name="shared prefix 1", text=f"{shared} {passage(_SENTENCES, 100)} The river"),
        Case(name="shared prefix 2", text=f"{shared} {passage(_SENTENCES, 100)} The baker"),
        Case(name="the same again", text=f"{shared} {passage(_SENTENCES, 20)} She"),
    ]
    if text.chat_template is not None:

        def chat(name: str, question: str) -> Case:
            system = f"{rng.getrandbits(48):012x} is your number. Answer in one sentence."
            roles = (("system", system), ("user", question))
            return Case(
                name=name, messages=tuple({"role": role, "content": text} for role, text in roles)
            )

        found += [
            chat("chat", "What is the capital of France?"),
            chat("chat, long", passage(_SENTENCES, 120) + " What is this text about?"),
        ]
    if drawn:
        found += [
            Case(name="drawn, short", text="Once upon a time", temperature=1.0),
            Case(name="drawn, long", text=passage(_SENTENCES, 200), temperature=1.0),
        ]
    return found


# What the cluster says


@dataclass(frozen=True, slots=True)
class Said:
    """An answer of the API: tokens as they are spelled there, with their log-probabilities."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish: str
    prompt_tokens: int
    cached_tokens: int


class Api:
    """The OpenAI API of one cluster."""

    def __init__(self, url: str, model: str, *, api_key: str | None, transport: Any = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=300.0, trust_env=False, transport=transport
        )
        self._model = model

    def close(self) -> None:
        self._http.close()

    def ask(self, case: Case) -> Said:
        """Raises ClusterError, RequestError."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": case.max_tokens,
            "temperature": case.temperature,
            "seed": SEED,
        }
        if case.text is None:
            body |= {"messages": list(case.messages), "logprobs": True, "top_logprobs": 0}
            answer = self._post("/v1/chat/completions", body)
            choice = answer["choices"][0]
            content = choice["logprobs"]["content"]
            tokens = tuple(spell(bytes(entry["bytes"])) for entry in content)
            logprobs = tuple(entry["logprob"] for entry in content)
        else:
            answer = self._post("/v1/completions", body | {"prompt": case.text, "logprobs": 0})
            choice = answer["choices"][0]
            tokens = tuple(choice["logprobs"]["tokens"])
            logprobs = tuple(choice["logprobs"]["token_logprobs"])
        usage = answer["usage"]
        return Said(
            tokens,
            logprobs,
            choice["finish_reason"],
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    def prompt_ids(self, case: Case) -> list[int]:
        """What the gateway makes of the prompt."""
        if case.text is None:
            body: dict[str, Any] = {"messages": list(case.messages)}
        else:
            body = {"prompt": case.text}
        return self._post("/tokenize", body | {"model": self._model})["tokens"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ClusterError(f"{self._http.base_url}{path}: {error}") from error
        if answer.status_code != 200:
            raise ClusterError(f"{path}: status {answer.status_code}: {answer.text[:300]}")
        return answer.json()


def spell(token: bytes) -> str:
    r"""A token as `/v1/completions` spells it: `bytes:\xe2\x80` where it is no whole character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


# What one engine says

Continue = Callable[[tuple[int, ...]], Sequence[SampledToken]]
"""The engine's own tokens after the prompt and these, with its `TOP` candidates at each."""


def judge(
    said: Said, go_on: Continue, token_bytes: Callable[[int], bytes], tolerance: float
) -> tuple[list[Fork], float, list[str]]:
    """Compare an answer with the engine's, which is asked again behind every fork.

    Returns the forks, the largest difference in log-probability where both agree, and failures.
    """
    forks: list[Fork] = []
    history: list[int] = []
    difference = 0.0
    own: Sequence[SampledToken] = go_on(())
    offset = 0
    for at, spelled in enumerate(said.tokens):
        if at - offset >= len(own):
            return forks, difference, [f"goes on after the engine's end at token {at}"]
        expected = own[at - offset]
        if spell(token_bytes(expected.token_id)) == spelled:
            assert expected.logprob is not None
            difference = max(difference, abs(expected.logprob - said.logprobs[at]))
            history.append(expected.token_id)
            continue
        taken = next(((t, p) for t, p in expected.top if spell(token_bytes(t)) == spelled), None)
        if taken is None:
            return (
                forks,
                difference,
                [
                    f"token {at} is {spelled!r}, which is not among the engine's "
                    f"{len(expected.top)} most likely; it says "
                    f"{spell(token_bytes(expected.token_id))!r}"
                ],
            )
        token_id, logprob = taken
        best = max(p for _, p in expected.top)
        fork = Fork(at, best - logprob, best - logprob <= tolerance and tolerance > 0)
        forks.append(fork)
        if not fork.allowed:
            return (
                forks,
                difference,
                [
                    f"token {at} is {spelled!r}, {fork.margin:.4g} below the engine's "
                    f"{spell(token_bytes(expected.token_id))!r}; allowed is {tolerance:g}"
                ],
            )
        history.append(token_id)
        if at + 1 < len(said.tokens):
            own, offset = go_on(tuple(history)), at + 1
    if len(own) + offset > len(said.tokens) and (not forks or forks[-1].at + 1 < len(said.tokens)):
        return forks, difference, [f"ends after {len(said.tokens)} tokens, the engine goes on"]
    return forks, difference, []


class LocalEngine:
    """One engine in this process. Imports torch."""

    def __init__(self, model: ServedModel, text: TextModel) -> None:
        """On one rank, whatever the cluster's replicas take: sums over ranks are under test too. On
        GPUs on as many as decode, since the model may need them. Raises ConfigError."""
        from engine.build import build_engine

        args = model.args
        if args.accelerator == "cpu":
            args = args.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 1})
        config = args.engine_config(model.settings.scheduler())
        self.built: BuiltEngine = build_engine(config, text.tokenizer)
        self._count = 0

    @property
    def dtype(self) -> str:
        return self.built.model.dtype

    def go_on(
        self, prompt_ids: Sequence[int], case: Case, output_ids: tuple[int, ...]
    ) -> list[SampledToken]:
        """Tokens after `output_ids`, which count in the case's `max_tokens`."""
        self._count += 1
        engine = self.built.engine
        request = Request(
            request_id=f"verify-{self._count}",
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams(
                max_tokens=case.max_tokens,
                temperature=case.temperature,
                seed=SEED,
                logprobs=TOP,
            ),
            output_ids=output_ids,
        )
        engine.submit(request)
        tokens: list[SampledToken] = []
        while True:
            step = engine.step()
            assert step is not None, "the engine stopped in the middle of a request"
            for output in step.outputs:
                if output.token is None:
                    raise ClusterError("the engine of this process could not sample a token")
                tokens.append(output.token)
                if output.finish is not None:
                    return tokens

    def close(self) -> None:
        self.built.engine.close()


# What moved


def compare_blocks(
    decode: Sequence[Mapping[str, Any]], prefill: Sequence[Mapping[str, Any]]
) -> tuple[int, list[str]]:
    """Blocks that both pools hold, and what differs.

    Each side lists one `kv_digest` a replica: `digests` of the prompt's blocks, from the first on.
    A block on decode must be one that some prefill replica computed.
    """
    compared = 0
    failures: list[str] = []
    sizes = {each["block_tokens"] for each in [*decode, *prefill]}
    if len(sizes) > 1:
        return 0, [f"blocks of {sorted(sizes)} tokens cannot be compared: use one block_tokens"]
    for receiver in decode:
        for i, digest in enumerate(receiver["digests"]):
            sent = {each["digests"][i] for each in prefill if len(each["digests"]) > i}
            if not sent:
                continue
            compared += 1
            if digest not in sent:
                failures.append(
                    f"KV block {i} on decode replica {receiver['replica']} is not what prefill "
                    "computed"
                )
    return compared, failures


@dataclass(slots=True)
class Verification:
    """One run of all cases."""

    model: str
    dtype: str
    threads: int
    tolerance: float
    verdicts: list[Verdict]
    failures: list[str]

    @property
    def passed(self) -> bool:
        return not self.failures and all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "model": self.model,
            "dtype": self.dtype,
            "threads": self.threads,
            "tolerance": self.tolerance,
            "num_forks": sum(len(verdict.forks) for verdict in self.verdicts),
            "num_blocks": sum(verdict.num_blocks or 0 for verdict in self.verdicts),
            "cases": [{**asdict(v), "passed": v.passed} for v in self.verdicts],
            "failures": self.failures,
        }


def run(
    stack: Stack, model: ServedModel, *, tolerance: float | None, api_key: str | None
) -> Verification:
    """All cases, one after the other.

    Raises:
        EngineError: the model cannot be loaded here, or the cluster does not answer.
    """
    text = load_text(model.args.source)
    say(f"{model.name}: building the engine to compare with")
    engine = LocalEngine(model, text)
    say(HEADER)
    api = Api(stack.url, model.name, api_key=api_key)
    try:
        import torch

        dtype = engine.dtype
        allowed = TOLERANCE[dtype] if tolerance is None else tolerance
        verdicts: list[Verdict] = []
        for case in cases(text, random.Random(time.time_ns()), drawn=dtype == "float64"):
            verdict = _one(stack, model, api, engine, text, case, allowed)
            say(line(verdict))
            verdicts.append(verdict)
        failures: list[str] = []
        if stack.is_ours and model.args.prefill and not any(v.num_blocks for v in verdicts):
            failures.append(
                "no prompt went through prefill, so no KV was compared: is its pool healthy?"
            )
        return Verification(model.name, dtype, torch.get_num_threads(), allowed, verdicts, failures)
    finally:
        api.close()
        engine.close()


def _one(
    stack: Stack,
    model: ServedModel,
    api: Api,
    engine: LocalEngine,
    text: TextModel,
    case: Case,
    tolerance: float,
) -> Verdict:
    prompt_ids = api.prompt_ids(case)
    ours = text.chat_ids(case.messages) if case.text is None else text.tokenizer.encode(case.text)
    before = _decisions(stack, model)
    said = api.ask(case)
    verdict = Verdict(
        case.name,
        prompt_tokens=len(prompt_ids),
        cached_tokens=said.cached_tokens,
        num_tokens=len(said.tokens),
    )
    if list(prompt_ids) != list(ours):
        verdict.failures.append("the gateway's token ids are not the tokenizer's")
    if said.prompt_tokens != len(prompt_ids):
        verdict.failures.append(f"usage says {said.prompt_tokens} prompt tokens")
    after = _decisions(stack, model)
    taken = [way for way, count in after.items() if count > before.get(way, 0)]
    verdict.route = ", ".join(way.rstrip("/") for way in taken) or None
    verdict.forks, verdict.max_logprob_difference, failures = judge(
        said,
        lambda history: engine.go_on(prompt_ids, case, history),
        text.tokenizer.token_bytes,
        tolerance,
    )
    verdict.failures += failures
    if any(way.startswith("disaggregated") for way in taken):
        call = {"token_ids": prompt_ids, "salt": ""}
        decode = stack.ask_replicas(model.app, "Decode", "kv_digest", call)
        prefill = stack.ask_replicas(model.app, "Prefill", "kv_digest", call)
        verdict.num_blocks, failures = compare_blocks(decode, prefill)
        verdict.failures += failures
        whole = len(prompt_ids) // model.args.block_tokens
        if verdict.num_blocks < whole:
            verdict.failures.append(
                f"{verdict.num_blocks} KV blocks were there to compare, the prompt has {whole}"
            )
    return verdict


def _decisions(stack: Stack, model: ServedModel) -> dict[str, int]:
    """How often each way was taken, over all decode replicas."""
    if not stack.is_ours:
        return {}
    total: dict[str, int] = {}
    for stats in stack.ask_replicas(model.app, "Decode", "stats", {}):
        for way, count in stats["counters"]["decisions"].items():
            total[way] = total.get(way, 0) + count
    return total


def line(verdict: Verdict) -> str:
    """One row of the table."""
    forks = ", ".join(f"{fork.at} ({fork.margin:.3g})" for fork in verdict.forks)
    blocks = "-" if verdict.num_blocks is None else str(verdict.num_blocks)
    row = (
        f"{'ok' if verdict.passed else 'FAILED':7}{verdict.name:18}{verdict.prompt_tokens:7}"
        f"{verdict.cached_tokens:8}{verdict.num_tokens:8}  {verdict.route or 'unknown':28}"
        f"{blocks:>7}  {'forked at ' + forks if forks else 'equal'}"
    )
    return "\n".join([row, *(f"         {failure}" for failure in verdict.failures)])


HEADER = (
    f"{'':7}{'prompt':18}{'tokens':>7}{'cached':>8}{'answer':>8}  {'route':28}{'blocks':>7}  tokens"
)


def _served(stack: Stack, name: str | None, dtype: str) -> ServedModel:
    """Raises RequestError if it is not there, ClusterError if nobody answers."""
    from cluster.bench.stack import ServedModel
    from deployments.settings import ModelArgs, PoolSettings

    if stack.is_ours:
        models = [model for model in stack.models() if model.args.source != "synthetic"]
    else:
        try:
            listed = httpx.get(f"{stack.url}/v1/models", timeout=10.0, trust_env=False).json()
            models = [
                ServedModel(
                    name=each["id"],
                    app="",
                    args=ModelArgs(name=each["id"], source=each["root"], dtype=dtype),  # pyright: ignore[reportArgumentType]
                    settings=PoolSettings(),
                )
                for each in listed["data"]
            ]
        except httpx.HTTPError as error:
            raise NotRunning(f"{stack.url}: nobody answers ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{stack.url}/v1/models: not Tailrace's list of models") from error
    for model in models:
        if name in (None, model.name):
            return model
    names = ", ".join(model.name for model in models) or "none"
    raise RequestError(
        f"model {name!r} is not served here; there are: {names}",
        code="model_not_found",
        param="model",
        status=404,
    )


@click.command()
@click.option("--url", help="Server to verify. Default: the running session.")
@click.option("--model", help="Default: the first one that computes.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float64"]),
    default="auto",
    show_default=True,
    help="Of a server that is not ours; of our own it is known.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="In logits. Default: 0 in float64, 0.001 in float32, 0.25 in bfloat16.",
)
@click.option("--api-key", envvar="TAILRACE_API_KEY", help="Or TAILRACE_API_KEY.")
@json_option
def verify(
    url: str | None,
    model: str | None,
    dtype: str,
    tolerance: float | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Compare the running cluster with one engine: tokens, and the KV that moved.

    Exit code 1 where they differ. At a server that is not this machine's session only tokens are
    compared.
    """
    from cluster.bench.stack import Stack

    stack = Stack.running(url)
    if not stack.is_ours:
        say(f"{stack.url} is not a session of ours: its KV cannot be looked into")
    try:
        served = _served(stack, model, dtype)
        result = run(stack, served, tolerance=tolerance, api_key=api_key)
    finally:
        stack.close()
    if as_json:
        emit(result.to_json())
    else:
        click.echo(summary(result))
    if not result.passed:
        failed = [v.name for v in result.verdicts if not v.passed]
        raise VerifyFailed("; ".join(result.failures) or f"failed: {', '.join(failed)}")


def summary(result: Verification) -> str:
    forks = [fork for verdict in result.verdicts for fork in verdict.forks]
    blocks = sum(verdict.num_blocks or 0 for verdict in result.verdicts)
    worst = f", the widest at {max(fork.margin for fork in forks):.3g}" if forks else ""
    return (
        f"{result.model}, {result.dtype}, {result.threads} threads: "
        f"{sum(v.passed for v in result.verdicts)} of {len(result.verdicts)} prompts as one engine "
        f"says, {len(forks)} forks within {result.tolerance:g} logits{worst}, "
        f"{blocks} KV blocks with equal bytes"
    )
