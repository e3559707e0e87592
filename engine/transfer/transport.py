"""The seam between a decode replica and whatever moves KV to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.request import Request
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import Prefilled


@dataclass(slots=True)
class TransferNote:
    """How a pull went, filled in while it runs, for whoever explains it. Times are of this
    process's monotonic clock, 0 for never."""

    asked_s: float = 0.0
    """The other side was asked; before that it was dialled."""

    first_byte_s: float = 0.0
    final_s: float = 0.0
    """When the news came that the prompt is computed."""

    bytes_at_final: int = 0
    told: list[Any] | None = None
    """What the other side says it did, as it came."""


class KVTransport(Protocol):
    """One way to have a prompt computed elsewhere and its KV brought here.

    Implemented over links (`deployments.lifecycle.pull`), in process (`in_process`), and later by
    NIXL, which writes into device memory that the pool has registered.
    """

    async def pull(
        self,
        address: str,
        request: Request,
        intake: KVIntake,
        *,
        chain: tuple[bytes, ...],
        chain_tokens: int,
        note: TransferNote | None = None,
    ) -> Prefilled:
        """Bring tokens `[intake.first_token, intake.num_tokens)` of the request into the intake.

        `chain` is the hash chain over the request's tokens in units of `chain_tokens`: the offer
        must match it. Returns only when every byte is there and checked; raises TransferError
        otherwise. However it ends, the intake is closed and nothing is written to its blocks
        afterwards.
        """
        ...
