"""Prompts of an exact number of tokens that no cache has seen."""

from __future__ import annotations

import random

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

_TEXT = """
    river stone light water paper music garden window summer winter morning evening house road
    tree bird cloud mountain city bread cup table door story letter friend doctor teacher train
    ship island forest valley bridge market song dance color green blue red small large quick
    slow early late north south east west open close begin end give take find lose
"""
_WORDS = _TEXT.split()


def text_of(tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> tuple[str, list[int]]:
    """A text that encodes to exactly `num_tokens` ids, and the ids, special tokens included.

    Texts differ from their first words on, so that no prefix is shared. Raises ConfigError for a
    tokenizer that gives no text of this length.
    """
    for _ in range(100):
        words = [rng.choice(_WORDS)]
        ids: list[int] = []
        while len(ids) < num_tokens:
            words += rng.choices(_WORDS, k=max(1, (num_tokens - len(ids)) // 2))
            ids = tokenizer.encode(" ".join(words))
        text = " ".join(words)
        while len(ids) > num_tokens and text:
            text = text[:-1]
            ids = tokenizer.encode(text)
        if len(ids) == num_tokens:
            return text, ids
    raise ConfigError(f"no text of exactly {num_tokens} tokens was found for this tokenizer")
