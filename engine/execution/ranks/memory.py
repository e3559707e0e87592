"""The memory channel: KV of a rank whose memory the coordinator cannot map.

A rank on a device or on another machine copies pieces of its pool to and from frames, on a thread
of its own, so that transfers do not wait for steps. The coordinator asks for one piece at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from engine.execution.ranks.channel import Channel, ChannelError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.execution.pool import KVPool
    from engine.models.model import KVLayout
    from engine.models.shard import Span

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RemoteMemory:
    """The coordinator's side. Safe from several threads.

    Whatever goes wrong ends the channel: an answer that comes late would be taken for that of the
    next question. Every question after it raises at once.
    """

    def __init__(self, channel: Channel, layout: KVLayout, *, timeout_s: float) -> None:
        """`layout`: of the rank's part."""
        channel.limit_sends(timeout_s)
        self.on_lost: Callable[[str], None] | None = None
        """Called once, with the reason, on the thread whose question failed."""

        self._channel = channel
        self._row_bytes = layout.row_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._lost: str | None = None

    def read(
        self,
        block: int,
        offset: int,
        num_tokens: int,
        first_layer: int,
        last_layer: int,
        heads: Span,
    ) -> bytes:
        """KV in wire order; layers and heads in the rank's own numbering. Raises ChannelError."""
        rows = 2 * (last_layer - first_layer) * num_tokens * (heads[1] - heads[0])
        question = [Kind.READ, block, offset, num_tokens, first_layer, last_layer, heads]
        return self._ask(question, lambda answer: _piece(answer, rows * self._row_bytes))

    def write(
        self,
        block: int,
        offset: int,
        first_layer: int,
        last_layer: int,
        heads: Span,
        payload: bytes,
    ) -> None:
        """Inverse of `read`; returns once it is in the rank's pool. Raises ChannelError."""
        question = [Kind.WRITE, block, offset, first_layer, last_layer, heads, payload]
        self._ask(question, _written)

    def close(self) -> None:
        """Idempotent. A question that waits for its answer raises."""
        self.on_lost = None
        self._channel.close()

    def _ask(self, message: list[Any], read: Callable[[list[Any]], T]) -> T:
        with self._lock:
            if self._lost is not None:
                raise ChannelError(self._lost)
            try:
                self._channel.send(message)
                answer = self._channel.receive(self._timeout_s)
                if answer[0] == Kind.FAILED:
                    raise ChannelError(f"the rank could not move it: {answer[-1]}")
                return read(answer)
            except BaseException as error:
                self._lost = f"the memory of a rank is lost: {error}"
                self._channel.close()
                if self.on_lost is not None:
                    self.on_lost(self._lost)
                raise


def _piece(answer: list[Any], num_bytes: int) -> bytes:
    if answer[0] != Kind.PIECE or len(answer) != 2 or type(answer[1]) is not bytes:
        raise ChannelError(f"malformed frame: kind {answer[0]} where PIECE was due")
    if len(answer[1]) != num_bytes:
        raise ChannelError(f"a piece of {len(answer[1])} bytes where {num_bytes} were due")
    return answer[1]


def _written(answer: list[Any]) -> None:
    if answer != [Kind.WRITTEN]:
        raise ChannelError(f"malformed frame: kind {answer[0]} where WRITTEN was due")


def serve_memory(channel: Channel, pool: KVPool) -> None:
    """The rank's side: answer until the channel ends."""
    try:
        while True:
            message = channel.receive()
            if message[0] == Kind.READ and len(message) == 7:
                _, block, offset, num_tokens, first, last, (h0, h1) = message
                piece = pool.gather(block, offset, num_tokens, first, last, (h0, h1))
                channel.send([Kind.PIECE, bytes(piece)])
            elif message[0] == Kind.WRITE and len(message) == 7:
                _, block, offset, first, last, (h0, h1), payload = message
                pool.scatter((block,), offset, first, last, bytearray(payload), (h0, h1))
                channel.send([Kind.WRITTEN])
            else:
                raise ChannelError(f"malformed frame: kind {message[0]} on the memory channel")
    except ChannelError:
        pass  # the coordinator is gone, or gave this channel up
    except Exception as error:
        logger.exception("a piece of KV could not be moved")
        with contextlib.suppress(ChannelError):
            channel.send([Kind.FAILED, f"{type(error).__name__}: {error}"])
    finally:
        channel.close()
