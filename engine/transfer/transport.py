"""The seam between a decode replica and whatever moves KV to it."""

from __future__ import annotations

from typing import Protocol

from engine.request import Request
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import Prefilled


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
    ) -> Prefilled:
        """Bring tokens `[intake.first_token, intake.num_tokens)` of the request into the intake.

        `chain` is the hash chain over the request's tokens in units of `chain_tokens`: the offer
        must match it. Returns only when every byte is there and checked; raises TransferError
        otherwise. However it ends, the intake is closed and nothing is written to its blocks
        afterwards.
        """
        ...
