"""Request bodies. Unknown fields are ignored, known fields of a wrong type refused with their name.

Types and ranges that need no model are checked here; what needs the model or the operator's limits
in `prepare.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import LiteralString

from deployments.gateway.spans import Extension
from engine.errors import RequestError


class Body(BaseModel):
    """Strict: `"0.7"` is not a number and `1.0` not a count. NaN and infinities are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _wrong(message: str, kind: LiteralString = "wrong_type") -> PydanticCustomError:
    # The message is a template to pydantic: hand it over as a value.
    return PydanticCustomError(kind, "{message}", {"message": message})


def _stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and not all(
        isinstance(item, str) for item in cast("list[Any]", value)
    ):
        raise _wrong("must be a string or a list of strings")
    return cast("Any", value)


def _prompt(value: Any) -> list[str] | list[list[int]]:
    """One list of prompts, all text or all token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if not items:
            raise _wrong("is empty; send at least one prompt", "wrong_value")
        if all(type(item) is str for item in items):
            return items
        if all(type(item) is int for item in items):
            return [items]
        if all(type(item) is list for item in items):
            for i, ids in enumerate(items):
                if not ids:
                    raise _wrong(f"[{i}] is empty; send at least one token", "wrong_value")
                if not all(type(item) is int for item in ids):
                    raise _wrong(f"[{i}] must hold token ids only")
            return items
    raise _wrong(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    )


def _content(value: Any) -> Any:
    """A message's text: parts are joined, parts that are no text are refused."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string, null or a list of content parts")
    texts: list[str] = []
    for i, item in enumerate(cast("list[Any]", value)):
        part = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise _wrong(
                f"part {i} has type {str(kind)[:40]!r}: only text is understood; leave it out",
                "unsupported",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise _wrong(f"part {i}: `{kind}` must be a string")
        texts.append(text)
    return "\n".join(texts)


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value  # pydantic says what is wrong with it
    out: dict[int, float] = {}
    for key, bias in cast("dict[str, Any]", value).items():
        if type(bias) not in (int, float):
            raise _wrong(f"the bias of {str(key)[:40]!r} must be a number")
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise _wrong(f"{str(key)[:40]!r} is not a token id", "wrong_value")
        out[int(key)] = float(bias)
    return out


def _nullable(*options: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*options, {"type": "null"}]})


_STRING: dict[str, Any] = {"type": "string"}
_TOKENS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
}

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

Count = Annotated[int, Field(ge=1, le=1 << 31)]
ShortText = Annotated[str, StringConstraints(max_length=64)]
LongText = Annotated[str, StringConstraints(max_length=512)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: usage so far on every chunk."""


class SamplingBody(Body):
    """Fields that both endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[
        list[str] | None,
        BeforeValidator(_stop_list),
        _nullable(
            {**_STRING, "minLength": 1},
            {"type": "array", "items": {**_STRING, "minLength": 1}, "maxItems": 16},
        ),
    ] = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=128)
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    """0 and -1 (vLLM's) keep the whole vocabulary."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[int, float] | None,
        BeforeValidator(_logit_bias),
        _nullable(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }
        ),
    ] = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    ignore_eos: bool | None = None
    service_tier: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """`auto`, or a tier of this cluster: see `tiers`."""

    tailrace: Extension | None = None
    """Ours: time outside the model, the wish to have the answer explained, what is optional, how
    many passages were retrieved."""

    user: str | None = None
    safety_identifier: ShortText | None = None
    metadata: dict[ShortText, LongText] | None = Field(default=None, max_length=16)


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | None,
        BeforeValidator(_content),
        _nullable(_STRING, {"type": "array", "items": _PART}),
    ] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]


class ChatRequest(SamplingBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    """Wins over `max_tokens`."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(SamplingBody):
    """Body of `POST /v1/completions`. `prompt` becomes a list of texts or of token-id lists."""

    prompt: Annotated[
        Any,
        BeforeValidator(_prompt),
        WithJsonSchema(
            {
                "anyOf": [
                    _STRING,
                    {"type": "array", "items": _STRING, "minItems": 1},
                    _TOKENS,
                    {"type": "array", "items": _TOKENS, "minItems": 1},
                ]
            }
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(Body):
    """Body of `POST /tokenize` (vLLM's): `prompt`, or `messages` for the chat template."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """None: the only model there is."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of `POST /detokenize` (vLLM's)."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


B = TypeVar("B", bound=Body)

_CODES = {
    "missing": "missing_required_parameter",
    "wrong_value": "invalid_value",
    "unsupported": "unsupported_value",
    "literal_error": "invalid_value",
    "wrong_type": "invalid_type",
}


def parse(schema: type[B], body: bytes) -> B:
    """The validated body. Raises RequestError naming the field at fault and its value."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> RequestError:
    detail = error.errors(include_url=False)[0]
    kind, loc, value = detail["type"], detail["loc"], detail["input"]
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    if kind == "json_invalid":
        return RequestError(
            f"the body is no JSON ({message.removeprefix('invalid JSON: ')}); send one JSON object",
            code="invalid_json",
        )
    if not loc:
        return RequestError(
            f"the body is {_show(value)}; send one JSON object", code="invalid_type"
        )
    param = _path(loc)
    code = _CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "missing":
        return RequestError(f"{param}: this field is required; add it", code=code, param=param)
    return RequestError(f"{param}={_show(value)}: {message}", code=code, param=param)


def _path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` → `messages[0].role`. Members of a union are left out."""
    path = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "dict"):
            path += f".{part}"
    return path


def _show(value: Any) -> str:
    """A value in a message: short, whatever was sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
    if isinstance(value, list):
        return f"a list of {len(cast('list[Any]', value))}"
    if isinstance(value, dict):
        return f"an object of {len(cast('dict[str, Any]', value))} fields"
    return f"a {type(value).__name__}"
