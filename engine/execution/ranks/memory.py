"""The memory channel: KV of a rank whose memory the coordinator cannot map.

A rank on a device or on another machine copies pieces of its pool to and from frames, on a thread
of its own, so that transfers do not wait for steps. The coordinator asks for one piece at a time.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from engine.execution.ranks.channel import Channel, ChannelError, Kind

if TYPE_CHECKING:
    from engine.execution.pool import KVPool
    from engine.models.shard import Span

logger = logging.getLogger(__name__)


class RemoteMemory:
    """The coordinator's side. Safe from several threads."""

    def __init__(self, channel: Channel, *, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

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
        answer = self._ask([Kind.READ, block, offset, num_tokens, first_layer, last_layer, heads])
        if answer[0] != Kind.PIECE or len(answer) != 2 or type(answer[1]) is not bytes:
            raise ChannelError(f"malformed frame: kind {answer[0]} where PIECE was due")
        return answer[1]

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
        answer = self._ask([Kind.WRITE, block, offset, first_layer, last_layer, heads, payload])
        if answer[0] != Kind.WRITTEN:
            raise ChannelError(f"malformed frame: kind {answer[0]} where WRITTEN was due")

    def close(self) -> None:
        self._channel.close()

    def _ask(self, message: list[Any]) -> list[Any]:
        with self._lock:
            self._channel.send(message)
            answer = self._channel.receive(self._timeout_s)
        if answer[0] == Kind.FAILED:
            raise ChannelError(f"the rank's memory failed: {answer[-1]}")
        return answer


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
        channel.close()
    except Exception as error:
        logger.exception("a piece of KV could not be moved")
        channel.send([Kind.FAILED, f"{type(error).__name__}: {error}"])
