"""What Serve calls on a replica of either pool, whatever it computes."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from deployments.engine_host import EngineHost
from deployments.holds import PairHolds
from deployments.settings import ModelArgs, PoolSettings


class PoolService(Protocol):
    """Everything a replica does, without Serve."""

    replica_id: str
    host: EngineHost
    holds: PairHolds

    def apply(self, settings: PoolSettings) -> None:
        """Adopt what can change while running. Raises ConfigError, and changes nothing, for what
        the engine cannot do."""
        ...

    def stats(self) -> dict[str, Any]: ...
    async def close(self) -> None: ...


S = TypeVar("S", bound=PoolService)


class PoolReplica(Generic[S]):
    """Serve's view of a replica: health, configuration, first contact.

    The deployments `Prefill` and `Decode` derive from it. Serve's decorator stays on them: what it
    makes is pickled by value, and its bases by the module they are in.
    """

    service: S
    args: ModelArgs

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        self.service.apply(PoolSettings.parse(user_config))

    async def hold(self, call: dict[str, Any]) -> str:
        """Stay open while `call["peer"]`, at the other end of a link, has work here: Serve's drain
        waits for it."""
        return await self.service.holds.hold(call["peer"])

    async def kv_digest(self, call: dict[str, Any]) -> dict[str, Any]:
        """SHA-256 of each whole cached block of `call["token_ids"]`, for `tailrace verify`."""
        digests = await self.service.host.kv_digests(tuple(call["token_ids"]), call["salt"])
        return {
            "replica": self.service.replica_id,
            "block_tokens": self.args.block_tokens,
            "digests": digests,
        }

    def stats(self, call: dict[str, Any]) -> dict[str, Any]:
        """Counters and gauges of this replica now (for the benchmarks and for people)."""
        return self.service.stats()

    def check_health(self) -> None:
        """Raises RuntimeError when the engine will not go on; Serve then replaces the replica."""
        failure = self.service.host.failure
        if failure is not None:
            raise RuntimeError(f"the engine failed: {failure}")

    async def __del__(self) -> None:
        service = getattr(self, "service", None)  # None: the constructor failed
        if service is not None:
            await service.close()
