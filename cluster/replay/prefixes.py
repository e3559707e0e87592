"""What an infinite prefix cache would hold: block arithmetic, apart from any server."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens. Equal keys are equal tokens: of two lengths, the shorter one's are how the
    longer one begins."""

    key: Hashable
    num_tokens: int


class InfiniteCache:
    """A trie of prompts that forgets nothing.

    A prompt hits as many tokens as it has in common with the beginning of any prompt before it, cut
    to whole blocks of `block_tokens`; the last token of a prompt is always computed.
    """

    def __init__(self, block_tokens: int = 1) -> None:
        self._block_tokens = block_tokens
        self._children: dict[tuple[int, Hashable], dict[int, int]] = {}
        """By parent and key: the child for each length that was seen."""

        self._next = 1

    def offer(self, prompt: Sequence[Segment]) -> int:
        """Tokens of `prompt` that the prompts before it leave in the cache; then it is there."""
        hit, total, node, together = 0, 0, 0, True
        for segment in prompt:
            total += segment.num_tokens
            lengths = self._children.setdefault((node, segment.key), {})
            child = lengths.get(segment.num_tokens)
            if together:
                if child is not None:
                    hit += segment.num_tokens
                else:
                    hit += min(segment.num_tokens, max(lengths, default=0))
                    together = False
            if child is None:
                child = lengths[segment.num_tokens] = self._next
                self._next += 1
            node = child
        hit = min(hit, max(0, total - 1))
        return hit - hit % self._block_tokens
