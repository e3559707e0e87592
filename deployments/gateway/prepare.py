"""From a validated body to requests the engine understands: limits, template, token ids, seeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from deployments.gateway.backend import Backend, ModelInfo
from deployments.gateway.config import GatewayConfig, Limits
from deployments.gateway.identity.keyring import Identity
from deployments.gateway.ids import draw_name, draw_seed
from deployments.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingBody,
    Tool,
)
from deployments.gateway.spans import Extension
from deployments.gateway.tiers import Tier, served_tier
from engine.errors import RequestError
from engine.request import Request, SamplingParams
from engine.text.tokenizer import Tokenizer

INLINE_CHARS = 4096
"""Longest text that is tokenised on the event loop (about a millisecond). Longer ones go to a
thread, where the tokenizers library works without the interpreter lock."""

_MASK64 = (1 << 64) - 1

T = TypeVar("T")


class UsageMode(Enum):
    """When a stream carries token counts."""

    NONE = 0
    FINAL = 1
    """`usage: null` on every chunk and one more chunk with the counts."""

    CONTINUOUS = 2
    """Counts so far on every chunk too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One client request, resolved. Prompt p's choice c is the answer's choice `p * n + c`."""

    answer_id: str
    created: int
    info: ModelInfo
    requests: tuple[Request, ...]
    """One a prompt, with ids of their own."""

    n: int
    chat: bool
    stream: bool
    usage: UsageMode
    tier: str
    """That it is served at."""

    identity: Identity
    echo: tuple[str, ...] | None = None
    """Texts of the prompts, where the answer is to repeat them."""

    extension: Extension | None = None
    """What the client told beside OpenAI's fields."""

    def at_tier(self, name: str, tier: Tier) -> Plan:
        """The same, served at another tier."""
        promise = _promise(tier)
        return replace(
            self, tier=name, requests=tuple([replace(r, **promise) for r in self.requests])
        )

    def shortened(self, max_tokens: int) -> Plan:
        """The same with outputs of at most `max_tokens`."""
        return replace(self, requests=tuple([_cut(r, max_tokens) for r in self.requests]))

    def without_extras(self) -> Plan:
        """The same with one choice and without log-probabilities."""
        requests = [replace(r, params=replace(r.params, logprobs=None)) for r in self.requests]
        return replace(self, n=1, requests=tuple(requests))

    @property
    def num_choices(self) -> int:
        return self.n * len(self.requests)

    @property
    def logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def max_tokens(self) -> int:
        """Prompt and all the output it may get."""
        outputs = sum(request.params.max_tokens for request in self.requests)
        return self.prompt_tokens + self.n * outputs


def _promise(tier: Tier) -> dict[str, Any]:
    """What the engines must know of a tier."""
    return {
        "priority": tier.rank,
        "itl_target_ms": None if tier.itl_s is None else max(1, round(1000 * tier.itl_s)),
        "preemptible": tier.preemptible,
    }


def _cut(request: Request, max_tokens: int) -> Request:
    params = request.params
    if params.max_tokens <= max_tokens:
        return request
    least = min(params.min_tokens, max_tokens)
    return replace(request, params=replace(params, max_tokens=max_tokens, min_tokens=least))


async def prepare_chat(
    backend: Backend, config: GatewayConfig, identity: Identity, body: ChatRequest
) -> Plan:
    """Raises RequestError."""
    limits = limits_of(config, identity)
    _check_chat(body, limits)
    info = await _model_of(backend, config, identity, body.model)
    tools = None if body.tool_choice == "none" else body.tools
    prompt_ids = await tokenise_chat(
        info, body.messages, tools, body.add_generation_prompt is not False
    )
    _check_conversation(body.messages, limits, len(prompt_ids))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    return _plan(
        config,
        limits,
        identity,
        info,
        body,
        [prompt_ids],
        chat=True,
        asked=(field, body.max_completion_tokens or body.max_tokens),
        default=limits.default_max_tokens,
        logprobs=logprobs,
        prompt_field="messages",
    )


async def prepare_completion(
    backend: Backend, config: GatewayConfig, identity: Identity, body: CompletionRequest
) -> Plan:
    """Raises RequestError."""
    limits = limits_of(config, identity)
    prompts: list[str] | list[list[int]] = body.prompt
    _check_completion(body, limits, len(prompts))
    info = await _model_of(backend, config, identity, body.model)
    prompt_ids = [
        prompt if isinstance(prompt, list) else await tokenise(info, prompt, param="prompt")
        for prompt in prompts
    ]
    echo = None
    if body.echo:
        decode = info.text.tokenizer.decode
        echo = tuple(p if isinstance(p, str) else decode(p) for p in prompts)
    return _plan(
        config,
        limits,
        identity,
        info,
        body,
        prompt_ids,
        chat=False,
        asked=("max_tokens", body.max_tokens),
        default=16,  # OpenAI's, for this endpoint
        logprobs=body.logprobs,
        prompt_field="prompt",
        echo=echo,
    )


def _check_chat(body: ChatRequest, limits: Limits) -> None:
    _check_shared(body, limits)
    if len(body.messages) > limits.max_messages:
        raise RequestError(
            f"messages: {len(body.messages)} messages, at most {limits.max_messages} are taken; "
            "leave out or join older ones",
            param="messages",
        )
    if limits.max_tool_output_bytes is not None:
        _check_tool_outputs(body.messages, limits.max_tool_output_bytes)
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            f"response_format.type={body.response_format.type!r}: only 'text' is supported; ask "
            "for JSON in the messages and parse the answer",
            code="unsupported_value",
            param="response_format",
        )
    choice = body.tool_choice
    if choice == "required" or isinstance(choice, dict):
        raise RequestError(
            "tool_choice: a call cannot be forced here; send 'auto' or 'none'. With 'auto' the "
            "model is shown the tools and its answer is text",
            code="unsupported_value",
            param="tool_choice",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            f"top_logprobs={body.top_logprobs}: needs logprobs=true; set it or leave "
            "top_logprobs out",
            param="top_logprobs",
        )


def _check_tool_outputs(messages: Sequence[Message], most: int) -> None:
    for i, message in enumerate(messages):
        if message.role not in ("tool", "function") or not message.content:
            continue
        size = len(message.content.encode("utf-8", "surrogatepass"))
        if size > most:
            raise RequestError(
                f"messages[{i}]: a tool's output of {size} bytes, at most {most} are taken; send "
                "an extract or a summary of it",
                param=f"messages[{i}].content",
            )


def _check_conversation(messages: Sequence[Message], limits: Limits, prompt_tokens: int) -> None:
    """What is kept of a chat that goes on."""
    most = limits.max_conversation_tokens
    if most is None or prompt_tokens <= most:
        return
    turns = sum(message.role == "user" for message in messages)
    if turns > 1:
        raise RequestError(
            f"the conversation of {turns} user messages has {prompt_tokens} tokens: at most {most} "
            "are kept of one; leave out or summarise older messages",
            code="context_length_exceeded",
            param="messages",
        )


def _check_completion(body: CompletionRequest, limits: Limits, num_prompts: int) -> None:
    _check_shared(body, limits)
    n = body.n or 1
    if num_prompts > limits.max_prompts:
        raise RequestError(
            f"prompt: {num_prompts} prompts, at most {limits.max_prompts} in one request; send "
            "several requests",
            param="prompt",
        )
    if num_prompts * n > limits.max_choices:
        raise RequestError(
            f"{num_prompts} prompts times n={n}: at most {limits.max_choices} choices in one "
            "request; send several requests",
            param="n",
        )
    if body.best_of is not None and body.best_of > 1 and body.best_of != n:
        raise RequestError(
            f"best_of={body.best_of}: choosing the best of several is not supported; leave it out "
            "and use n",
            code="unsupported_value",
            param="best_of",
        )
    if body.suffix:
        raise RequestError(
            "suffix: inserting text is not supported; leave it out and end the prompt where the "
            "completion is to begin",
            code="unsupported_value",
            param="suffix",
        )
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs: the prompt's log-probabilities are not computed; leave one out",
            code="unsupported_value",
            param="echo",
        )


def _check_shared(body: SamplingBody, limits: Limits) -> None:
    if (body.n or 1) > limits.max_n:
        raise RequestError(
            f"n={body.n}: at most {limits.max_n} choices; send several requests", param="n"
        )
    if body.stop is not None and len(body.stop) > limits.max_stop:
        raise RequestError(
            f"stop: {len(body.stop)} strings, at most {limits.max_stop}; leave some out",
            param="stop",
        )
    retrieved = None if body.tailrace is None else body.tailrace.retrieved
    most = limits.max_retrieved_chunks
    if retrieved is not None and most is not None and retrieved > most:
        raise RequestError(
            f"tailrace.retrieved={retrieved}: at most {most} retrieved passages are taken; send "
            "those that rank highest",
            param="tailrace.retrieved",
        )


def _plan(
    config: GatewayConfig,
    limits: Limits,
    identity: Identity,
    info: ModelInfo,
    body: SamplingBody,
    prompts: Sequence[list[int]],
    *,
    chat: bool,
    asked: tuple[str, int | None],
    default: int | None,
    logprobs: int | None,
    prompt_field: str,
    echo: tuple[str, ...] | None = None,
) -> Plan:
    name = served_tier(body.service_tier, config.tiers, identity.tiers)
    promise = _promise(config.tiers[name])
    vocab_size = info.text.tokenizer.vocab_size
    for prompt in prompts:
        _check_ids(prompt_field, prompt, vocab_size)
    _check_ids("logit_bias", body.logit_bias or (), vocab_size)
    _check_ids("stop_token_ids", body.stop_token_ids or (), vocab_size)
    budgets = [
        output_budget(info, limits, len(prompt), asked, default, prompt_field) for prompt in prompts
    ]
    params = SamplingParams(
        max_tokens=budgets[0],
        seed=draw_seed() if body.seed is None else body.seed & _MASK64,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple((body.logit_bias or {}).items()),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
    )
    answer_id = ("chatcmpl-" if chat else "cmpl-") + draw_name()
    requests: list[Request] = []
    for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        own = params
        if i:
            # A seed of the client's gives each prompt what it would give alone; drawn seeds differ,
            # so that equal prompts get different answers.
            seed = draw_seed() if body.seed is None else params.seed
            own = replace(params, max_tokens=budget, seed=seed)
        request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{i}"
        requests.append(
            Request(
                request_id=request_id,
                prompt_ids=tuple(prompt),
                params=own,
                salt=identity.salt,
                **promise,
            )
        )
    return Plan(
        answer_id=answer_id,
        created=int(time.time()),
        info=info,
        requests=tuple(requests),
        n=body.n or 1,
        chat=chat,
        stream=bool(body.stream),
        usage=_usage_mode(config, body),
        tier=name,
        identity=identity,
        echo=echo,
        extension=body.tailrace,
    )


def _usage_mode(config: GatewayConfig, body: SamplingBody) -> UsageMode:
    options = body.stream_options
    asked = options.include_usage if options is not None else None
    # An explicit false wins over the operator's default.
    if not (config.include_usage if asked is None else asked):
        return UsageMode.NONE
    continuous = options is not None and options.continuous_usage_stats
    return UsageMode.CONTINUOUS if continuous else UsageMode.FINAL


def _check_ids(param: str, ids: Any, vocab_size: int) -> None:
    if not ids:
        return
    worst = min(ids)
    if worst >= 0:
        worst = max(ids)
        if worst < vocab_size:
            return
    shown = worst if abs(worst) < 10**20 else "a number of more than 20 digits"
    raise RequestError(
        f"{param}: token id {shown} is outside the model's vocabulary, 0 to {vocab_size - 1}; "
        "correct or leave it out",
        param=param,
    )


def output_budget(
    info: ModelInfo,
    limits: Limits,
    prompt_tokens: int,
    asked: tuple[str, int | None],
    default: int | None,
    prompt_field: str,
) -> int:
    """Tokens that may be generated. What the client asked for is granted or refused, never cut;
    without it the answer gets `default`, cut to what context and limits leave.

    Raises RequestError naming both numbers.
    """
    _check_prompt_length(info, limits, prompt_tokens, prompt_field)
    left = info.max_context_tokens - prompt_tokens
    ceilings = [c for c in (info.max_output_tokens, limits.max_output_tokens) if c is not None]
    field, wanted = asked
    if wanted is None:
        return min([left, *ceilings, *([] if default is None else [default])])
    if ceilings and wanted > min(ceilings):
        raise RequestError(
            f"{field}={wanted}: at most {min(ceilings)} tokens of output are served for "
            f"{info.name}; ask for {min(ceilings)} or fewer",
            param=field,
        )
    if wanted > left:
        raise RequestError(
            f"{prompt_tokens} tokens of prompt and {field}={wanted} are {prompt_tokens + wanted}: "
            f"{info.name} has a context of {info.max_context_tokens} tokens; ask for {left} or "
            f"fewer, or shorten the {prompt_field}",
            code="context_length_exceeded",
            param=prompt_field,
        )
    return wanted


def _check_prompt_length(
    info: ModelInfo, limits: Limits, prompt_tokens: int, param: str, at_least: str = ""
) -> None:
    if not prompt_tokens and not at_least:
        raise RequestError(f"the {param} has no tokens; send at least one", param=param)
    limit = info.max_context_tokens - 1  # room for one token of output
    name = f"{info.name} has a context of {info.max_context_tokens} tokens, output included"
    if limits.max_prompt_tokens is not None and limits.max_prompt_tokens < limit:
        limit = limits.max_prompt_tokens
        name = f"at most {limit} tokens of prompt are served here"
    if prompt_tokens > limit:
        raise RequestError(
            f"the prompt has {at_least}{prompt_tokens} tokens: {name}; shorten it to {limit}",
            code="context_length_exceeded",
            param=param,
        )


async def tokenise(
    info: ModelInfo, text: str, *, param: str, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a bare text. Raises RequestError where it is hopelessly too long."""

    def encode() -> list[int]:
        _check_text_length(info, text, param)
        return info.text.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await _off_loop(len(text), encode)


async def tokenise_chat(
    info: ModelInfo,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    add_generation_prompt: bool,
) -> list[int]:
    """Token ids of the templated messages. Raises RequestError."""
    plain = [_plain(message) for message in messages]
    plain_tools = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

    def encode() -> list[int]:
        template = info.text.chat_template
        if template is None:
            raise RequestError(
                f"model {info.name!r} has no chat template; use /v1/completions",
                code="unsupported_value",
                param="messages",
            )
        text = template.render(
            plain, add_generation_prompt=add_generation_prompt, tools=plain_tools
        )
        _check_text_length(info, text, "messages")
        # The template writes the special tokens itself.
        return info.text.tokenizer.encode(text, add_special_tokens=False)

    # A message costs the template about as much as 64 characters cost the tokenizer.
    size = sum(len(message["content"]) + 64 for message in plain)
    return await _off_loop(size, encode)


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def _plain(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {
        # `developer` is the newer name of the same role; templates know only the older.
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content or "",
    }
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    return out


def _check_text_length(info: ModelInfo, text: str, param: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before tokenising it takes seconds."""
    if len(text) <= INLINE_CHARS:
        return
    # Half as many tokens as the longest token allows: a normaliser may drop characters.
    fewest = len(text) // (2 * _longest_token(info.text.tokenizer))
    _check_prompt_length(info, Limits(), fewest, param, at_least="at least ")


@lru_cache(maxsize=64)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token; at least as many as it has characters."""
    return max(map(len, tokenizer.pieces(skip_special_tokens=False)), default=1) or 1


def visible_models(backend: Backend, identity: Identity) -> list[ModelInfo]:
    """What this key may ask for."""
    allowed = identity.models
    return [info for info in backend.models() if allowed is None or info.name in allowed]


def limits_of(config: GatewayConfig, identity: Identity) -> Limits:
    """The gateway's limits, narrowed by the key's and its tenant's."""
    own = identity.ceilings.model_dump(exclude_none=True)
    if not own:
        return config.limits
    for name, value in own.items():
        general = getattr(config.limits, name)
        own[name] = value if general is None else min(value, general)
    return config.limits.model_copy(update=own)


async def _model_of(
    backend: Backend, config: GatewayConfig, identity: Identity, name: str
) -> ModelInfo:
    name = config.canonical(name)
    if identity.models is not None and name not in identity.models:
        known = ", ".join(sorted(identity.models)) or "none"
        # As of a model that does not exist: what others may use is nobody's business.
        raise RequestError(
            f"model {name!r} does not exist here, or this key may not use it; it may use: {known}",
            code="model_not_found",
            param="model",
            status=404,
        )
    return await backend.model(name)


async def find_model(
    backend: Backend, config: GatewayConfig, identity: Identity, name: str | None
) -> ModelInfo:
    """The model called `name`; without a name, the only one. Raises RequestError."""
    if name is None:
        names = [info.name for info in visible_models(backend, identity)]
        if len(names) != 1:
            raise RequestError(
                f"model: {len(names)} models are served ({', '.join(names) or 'none'}); name one",
                code="missing_required_parameter",
                param="model",
            )
        name = names[0]
    return await _model_of(backend, config, identity, name)
