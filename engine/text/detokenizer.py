"""Token ids to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns a growing list of tokens into growing text, in constant time per token.

    The concatenation of all pushes and the flush equals `tokenizer.decode` of all ids: a character
    appears once, whole, with the token that completes it; bytes that can no longer become one are
    U+FFFD.
    """

    __slots__ = ("_at_start", "_decoder", "_pieces", "_size", "_texts", "pending")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False
    ) -> None:
        """`continues`: the tokens follow a text, so that a sentencepiece word boundary in front of
        the first one is a space and not the tokenizer's own (no difference for byte-level BPE)."""
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._size = len(self._pieces)
        self._texts = tokenizer.texts(skip_special_tokens)
        self._decoder = _Utf8Decoder("replace")
        self.pending = False
        """A character has begun and not ended."""

        self._at_start = tokenizer.strip_leading_space and not continues

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join([self.push_token(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        self.pending = False
        return self._strip(text) if self._at_start else text

    def push_token(self, token_id: int) -> str:
        """`push` of one token."""
        if not 0 <= token_id < self._size:
            return ""
        text = None if self.pending else self._texts[token_id]
        if text is None:
            text = self._decoder.decode(self._pieces[token_id])
            self.pending = bool(self._decoder.getstate()[0])
        return self._strip(text) if self._at_start else text

    def _strip(self, text: str) -> str:
        if text:
            self._at_start = False
        return text[1:] if text.startswith(" ") else text
