"""Stop strings over a stream of text: never returned, and held back no longer than needed."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string that completes.

    Of two stop strings that complete at the same character the longer one counts. So what comes out
    depends on the text alone, never on how it was cut into pushes: a request that moves to another
    replica in mid-answer, or gets several tokens in one step, ends at the same character.

    # |<----------------- emitted ----------------->|<- held ->|
    #                                               ^ longest suffix that begins a stop string
    """

    __slots__ = ("_held", "_last_characters", "_longest", "_prefixes", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops and [stop for stop in stops if stop])
        self._held = ""
        self.stopped = False
        if not self._stops:
            return
        self._prefixes = frozenset(stop[:n] for stop in self._stops for n in range(1, len(stop)))
        self._last_characters = frozenset(prefix[-1] for prefix in self._prefixes)
        self._longest = max(map(len, self._prefixes), default=0)

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Returns what may be shown now, and whether a stop string ended the stream.

        After that everything pushed is swallowed.
        """
        if not self._stops:
            return text, False
        if self.stopped:
            return "", True
        pending = self._held + text
        cut = self._first_stop(pending)
        if cut is not None:
            self._held = ""
            self.stopped = True
            return pending[:cut], True
        keep = self._suffix_to_hold(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def flush(self) -> str:
        """What is still held back: the stream ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, pending: str) -> int | None:
        """Where the text before the first completed stop string ends."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _suffix_to_hold(self, pending: str) -> int:
        if pending[-1:] not in self._last_characters:
            return 0  # nearly every push of nearly every stream
        for length in range(min(len(pending), self._longest), 0, -1):
            if pending[len(pending) - length :] in self._prefixes:
                return length
        return 0
