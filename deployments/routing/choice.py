"""Which replica of a pool takes the next piece of work. Pure: events and `now` in, an id out.

For decode when it picks a prefill replica, and for a gateway that picks a decode replica while the
admission queue is away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Replica:
    work: dict[str, int] = field(default_factory=dict[str, int])
    """Prompt tokens of each piece of work under way, by its key."""

    tokens: int = 0
    failures: int = 0
    rests_until: float = 0.0
    last_chosen: int = 0


class ReplicaChooser:
    """Least outstanding prompt tokens wins; equals take turns; who failed lately is skipped."""

    def __init__(self, *, first_rest_s: float = 0.5, max_rest_s: float = 10.0) -> None:
        """After a failure a replica rests for `first_rest_s`, doubled with each further failure in
        a row up to `max_rest_s`."""
        self._first_rest_s = first_rest_s
        self._max_rest_s = max_rest_s
        self._replicas: dict[str, _Replica] = {}
        self._choices = 0

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        """The running set. What is known of replicas that stay is kept; of others, forgotten."""
        old = self._replicas
        self._replicas = {
            replica_id: old.get(replica_id) or _Replica() for replica_id in replica_ids
        }

    def choose(self, now: float, excluding: Collection[str] = ()) -> str | None:
        """None when no replica is fit: all excluded, resting, or none there."""
        fit = [
            (replica.tokens, replica.last_chosen, replica_id)
            for replica_id, replica in self._replicas.items()
            if replica_id not in excluding and replica.rests_until <= now
        ]
        if not fit:
            return None
        _, _, chosen = min(fit)
        self._choices += 1
        self._replicas[chosen].last_chosen = self._choices
        return chosen

    def tokens(self) -> dict[str, int]:
        """Prompt tokens under way at each replica: what the choice goes by, least first."""
        return {replica_id: replica.tokens for replica_id, replica in self._replicas.items()}

    def begin(self, replica_id: str, key: str, prompt_tokens: int) -> None:
        """`key`, unique per replica, is under way there. A replica that left is ignored."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            assert key not in replica.work, f"{key!r} is already under way at {replica_id!r}"
            replica.work[key] = prompt_tokens
            replica.tokens += prompt_tokens

    def end(self, replica_id: str, key: str) -> None:
        """`key` is over, however it went. Idempotent."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.tokens -= replica.work.pop(key, 0)

    def failed(self, replica_id: str, now: float) -> None:
        """It did not do what was asked: let it rest."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.failures += 1
            rest_s = self._first_rest_s * 2 ** min(replica.failures - 1, 30)
            replica.rests_until = now + min(rest_s, self._max_rest_s)

    def succeeded(self, replica_id: str) -> None:
        """It works: the next failure starts with the shortest rest again."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.failures = 0
            replica.rests_until = 0.0

    def check(self) -> None:
        """Our own invariants."""
        for replica in self._replicas.values():
            assert replica.tokens == sum(replica.work.values()), "outstanding tokens drifted"
