"""The text of one choice: detokenised, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopStrings
from engine.text.tokenizer import Tokenizer

_NOTHING: list[str | None] = []


class TextStream:
    """What a client sees of one choice's tokens.

    Holds back only half characters and the beginning of a stop string. What has been shown after
    any number of tokens depends on those tokens alone, not on how they were grouped; so another
    replica that pushes the tokens already emitted (and drops what that returns) continues at the
    same character.
    """

    __slots__ = (
        "_detokenizer",
        "_num_tokens",
        "_params",
        "_plain",
        "_quick",
        "_stop_ids",
        "_stops",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=True)
        self._stops = StopStrings(params.stop)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._params = params
        self._num_tokens = 0
        self._plain: list[str | None] = _NOTHING if params.stop else tokenizer.texts(True)
        self._quick = self._plain
        """Empty while a character is unfinished: what follows then belongs to it."""

    def quick(self, token_id: int) -> str | None:
        """`push` of one token that is not the last: its text, where it has one and no stop string
        is looked for. None leaves the token to `push`. Nearly every token of most streams."""
        texts = self._quick
        return texts[token_id] if 0 <= token_id < len(texts) else None

    def push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, bool]:
        """Add tokens; with `finished` nothing follows and whatever was held back is returned.

        Returns the text that may be shown now, and whether a stop string ended the choice (the
        caller then ends the request; later pushes return nothing). The text of the first
        `min_tokens` tokens is not searched for stop strings. A token of `stop_token_ids` that ended
        the request is not shown, like a stop string.
        """
        shown, stopped = self._push(token_ids, finished)
        self._quick = _NOTHING if self._detokenizer.pending else self._plain
        return shown, stopped

    def _push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, bool]:
        if self._stops.stopped:
            return "", True
        shown: list[str] = []
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if finished and i == last and token_id in self._stop_ids:
                break
            self._num_tokens += 1
            text = self._detokenizer.push_token(token_id)
            if self._num_tokens > self._params.min_tokens:
                text, stopped = self._stops.push(text)
            else:
                stopped = False
            if text:
                shown.append(text)
            if stopped:
                return "".join(shown), True
        if finished:
            text, stopped = self._stops.push(self._detokenizer.flush())
            shown.append(text)
            if stopped:
                return "".join(shown), True
            shown.append(self._stops.flush())
        return "".join(shown), False
