"""Text for a prompt's segments: seeded, of exact length, alike where keys are alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from cluster.replay.prefixes import Segment
from cluster.replay.vocabulary import Vocabulary

FIRST_ID, NUM_IDS = 1000, 4096
"""Token ids used where nothing is known of the vocabulary: ordinary tokens of every large one."""


class PromptWriter:
    """Writes segments. Equal keys and seeds give equal tokens on any machine."""

    def __init__(self, vocabulary: Vocabulary | None, seed: int) -> None:
        """Without a vocabulary only `ids` can be written."""
        self._vocabulary = vocabulary
        self._seed = seed
        self._text_of = lru_cache(maxsize=8192)(self._write_text)

    def text(self, segments: Iterable[Segment]) -> str:
        """One token a word; the first word without the space before it."""
        return "".join([self._text_of(segment) for segment in segments]).lstrip(" ")

    def ids(self, segments: Iterable[Segment]) -> list[int]:
        return [token for segment in segments for token in self._ids(segment)]

    def _write_text(self, segment: Segment) -> str:
        assert self._vocabulary is not None, "no vocabulary to write text with"
        words = self._vocabulary.words
        num = len(words)
        return "".join([words[byte % num] for byte in self._bytes(segment, 1)])

    def _ids(self, segment: Segment) -> list[int]:
        if self._vocabulary is not None:
            ids = self._vocabulary.ids
            return [ids[byte % len(ids)] for byte in self._bytes(segment, 1)]
        raw = self._bytes(segment, 2)
        return [
            FIRST_ID + int.from_bytes(raw[i : i + 2], "little") % NUM_IDS
            for i in range(0, len(raw), 2)
        ]

    def _bytes(self, segment: Segment, per_token: int) -> bytes:
        """An extendable hash, so that a shorter segment is how a longer one of its key begins."""
        name = f"{self._seed}\0{segment.key!r}".encode()
        return hashlib.shake_128(name).digest(per_token * segment.num_tokens)
