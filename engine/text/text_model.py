"""Everything about a model that is text: what a gateway loads, without weights or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError, RequestError
from engine.text.chat_template import ChatTemplate, Message
from engine.text.gguf_header import GGUFHeader, read_gguf_header
from engine.text.json_file import read_json
from engine.text.source import Source, resolve_source
from engine.text.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    tokenizer_from_directory,
    tokenizer_from_gguf,
)

BUILTIN_CONTEXT_TOKENS = 4096
"""Context of the built-in models. They could count further; prompts for them stay comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Tokenizer, chat template and limits of one model."""

    name: str
    """As the files call it; what clients call it is configuration."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a base model, which has no notion of messages."""

    max_context_tokens: int
    """Positions the model was trained for."""

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Prompt token ids of a chat. No BOS is added: the template writes the model's own.

        Raises RequestError for messages the template cannot take, or for a model without template.
        """
        if self.chat_template is None:
            raise RequestError(
                f"model {self.name!r} has no chat template: use /v1/completions",
                code="unsupported_value",
                param="messages",
            )
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )
        return self.tokenizer.encode(text)


def load_text(source: str) -> TextModel:
    """Load the textual half of a model source (`engine.text.source`).

    Takes a quarter of a second for a vocabulary of 50,000; the caller keeps the result. Raises
    ConfigError.
    """
    resolved = resolve_source(source)
    if resolved.kind == "builtin":
        return TextModel(
            name=resolved.name,
            tokenizer=byte_tokenizer(),
            chat_template=ChatTemplate.default(),
            max_context_tokens=BUILTIN_CONTEXT_TOKENS,
        )
    if resolved.kind == "gguf":
        return text_from_gguf(read_gguf_header(resolved.files), resolved.name)
    return _text_from_directory(resolved)


def text_from_gguf(header: GGUFHeader, name: str) -> TextModel:
    """The textual half of a GGUF file whose header was read already."""
    architecture = header.require("general.architecture", str)
    return TextModel(
        name=header.get("general.basename", str) or name,
        tokenizer=tokenizer_from_gguf(header),
        chat_template=ChatTemplate.from_gguf(header),
        max_context_tokens=header.require(f"{architecture}.context_length", int),
    )


def _text_from_directory(source: Source) -> TextModel:
    path = source.files
    context = read_json(path / "config.json").get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ConfigError(
            f"{path / 'config.json'}: max_position_embeddings={context!r}: must be 1 or more"
        )
    return TextModel(
        name=source.name,
        tokenizer=tokenizer_from_directory(path),
        chat_template=ChatTemplate.from_directory(path),
        max_context_tokens=context,
    )
