"""Messages to the text a chat model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import ConfigError, RequestError
from engine.text.gguf_header import GGUFHeader
from engine.text.json_file import as_list, as_object, read_json
from engine.text.tokenizer import special_token_text

Message = Mapping[str, Any]

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""For the built-in models, which were trained on nothing."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training: transparent here."""

    tags = {"generation"}  # noqa: RUF012 (an attribute that jinja reads)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class ChatTemplate:
    """A jinja chat template, rendered as transformers does.

    The template comes with the model and is untrusted: it runs in jinja's immutable sandbox and
    sees plain values only.
    """

    def __init__(
        self,
        template: str,
        *,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens` are the variables (`bos_token`, ...) that a template may write;
        `tool_template` replaces `template` for requests with tools; `now` is what `strftime_now`
        reads. Raises ConfigError for a template that does not parse, naming `origin`."""
        self._special_tokens = dict(special_tokens or {})
        environment = _environment(now)
        try:
            self._template = _compile(environment, template)
            self._tool_template = _compile(environment, tool_template or template)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{origin}: line {error.lineno}: {error.message}") from error

    @classmethod
    def from_gguf(cls, header: GGUFHeader) -> ChatTemplate | None:
        """The template of a GGUF file; None if it has none."""
        template = header.get("tokenizer.chat_template", str)
        if template is None:
            return None
        tokens: list[str] = header.require("tokenizer.ggml.tokens", list)
        special: dict[str, str] = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = header.get(f"tokenizer.ggml.{key}_token_id", int)
            if token_id is not None and token_id < len(tokens):
                special[f"{name}_token"] = tokens[token_id]
        return cls(
            template,
            tool_template=header.get("tokenizer.chat_template.tool_use", str),
            special_tokens=special,
            origin=f"{header.path}: tokenizer.chat_template",
        )

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate | None:
        """`chat_template.jinja`, or the key of tokenizer_config.json; None without either."""
        config = read_json(path / "tokenizer_config.json", missing={})
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        texts = {name: special_token_text(config, name) for name in names}
        special = {name: text for name, text in texts.items() if text is not None}
        file = path / "chat_template.jinja"
        if file.is_file():
            try:
                template = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}: cannot be read as UTF-8 ({error})") from error
            return cls(template, special_tokens=special, origin=str(file))
        origin = f"{path / 'tokenizer_config.json'}: chat_template"
        value = config.get("chat_template")
        if value is None:
            return None
        if isinstance(value, str):
            return cls(value, special_tokens=special, origin=origin)
        named = _named_templates(value, origin)
        if "default" not in named:
            raise ConfigError(f"{origin}: named {', '.join(named)}, but none of them 'default'")
        return cls(
            named["default"],
            tool_template=named.get("tool_use"),
            special_tokens=special,
            origin=origin,
        )

    @classmethod
    def default(cls) -> ChatTemplate:
        return cls(DEFAULT_TEMPLATE)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for `messages`, special tokens spelled out. Encode it without adding any.

        Content given as a list of text parts is joined with newlines. Raises RequestError with
        `param="messages"` for messages that the template, or a text model, cannot take.
        """
        if not messages:
            raise RequestError("messages: empty, send at least one message", param="messages")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                messages=plain,
                tools=_plain(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _TemplateRefusal as error:
            raise RequestError(
                f"messages: the model's chat template refuses them: {error.message}",
                param="messages",
            ) from error
        # A template is a program: on messages it did not foresee it fails like any other.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RequestError(
                f"messages: the model's chat template fails on them ({type(error).__name__}: "
                f"{error}): check roles and content",
                param="messages",
            ) from error


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    template = environment.from_string(source)
    # Jinja layers a template's own globals over the environment's, and walks through the layers at
    # every rendering: three quarters of the time of a short one. There are none of its own.
    template.globals = dict(template.globals)
    return template


def _environment(now: Callable[[], datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise _TemplateRefusal(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML, which no model was trained on.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _named_templates(value: Any, origin: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in as_list(value) or [None]:
        name, template = as_object(entry).get("name"), as_object(entry).get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ConfigError(f"{origin}: must be a string or a list of {{name, template}}")
        named[name] = template
    return named


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """What templates expect: content a string, tool arguments an object, no key that is None."""
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}].role: must be a string", param="messages")
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    plain["content"] = _text_content(index, message.get("content"))
    for call in as_list(plain.get("tool_calls")):
        function = as_object(as_object(call).get("function"))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            function["arguments"] = _arguments(arguments)
    return plain


def _text_content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return str.__str__(content)
    parts = _plain(content)
    if not isinstance(parts, list):
        raise RequestError(
            f"messages[{index}].content: must be a string or a list of text parts, is a "
            f"{type(content).__name__}",
            param="messages",
        )
    texts: list[str] = []
    for part in map(as_object, as_list(parts)):
        kind, text = part.get("type"), part.get("text")
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"messages[{index}].content: part of type {kind!r}: only text parts can be read",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _arguments(text: str) -> Any:
    """The API carries a call's arguments as JSON text, templates iterate over the object."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return as_object(value) if isinstance(value, dict) else text


def _plain(value: Any) -> Any:
    """Rebuilt from exact JSON types, so that a template finds no methods beyond theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(item) for key, item in fields.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    raise RequestError(
        f"messages: a value of type {type(value).__name__} is not JSON", param="messages"
    )
