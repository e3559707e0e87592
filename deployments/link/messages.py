"""What travels on a link. Each message is a msgpack array whose first item is its `Kind`.

Values only: numbers, strings, bytes and lists, never names that the other side must look up.
Deadlines are remaining milliseconds, never timestamps: two hosts do not share a clock.

```
gateway → decode   SUBMIT CANCEL CREDIT DRAIN    decode → gateway   STEP REFUSE SNAPSHOT
gateway → queue    ACQUIRE ABANDON RELEASE       queue → gateway    GRANT REFUSE SNAPSHOT LEADS
decode  → queue    REPORT                        queue → decode     LEADS
queue   → queue                                  in answer          LEADS
decode  → prefill  PREFILL ACK RENEW DONE HELD   prefill → decode   MANIFEST CHUNK FINAL FAIL
                                                                    ALIVE SNAPSHOT AGENT READY
                                                                    HELD
gateway ↔ decode   ASK TELL
both ways          HELLO PROOF BEAT BYE
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from deployments.explain.queueing import QueueFacts
from engine.errors import EngineError, Overloaded, RequestError, TransferError
from engine.request import FinishReason, Request

PROTOCOL_VERSION = 5


class Kind(IntEnum):
    HELLO = 0
    PROOF = 1
    BEAT = 2
    BYE = 3

    SUBMIT = 10
    CANCEL = 11
    CREDIT = 12
    STEP = 13
    REFUSE = 14
    DRAIN = 15

    ACQUIRE = 20
    ABANDON = 21
    RELEASE = 22
    GRANT = 23
    REPORT = 24
    POLICY = 25
    """A gateway's tiers and limits for the queue."""

    LEADS = 26
    """The queue's epoch while it leads, 0 while it stands by: first of all, and at every change."""

    PREFILL = 30
    MANIFEST = 31
    CHUNK = 32
    ACK = 33
    FINAL = 34
    FAIL = 35
    RENEW = 36
    DONE = 37
    ALIVE = 38
    HELD = 39

    SNAPSHOT = 40

    ASK = 50
    TELL = 51

    AGENT = 60
    READY = 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Leave to submit to one decode replica. Void after `expiry_ms` unless submitted."""

    grant_id: int
    epoch: int
    """Of the queue that granted it; a restarted queue counts higher."""

    replica_id: str
    expiry_ms: int
    kept: int = 0
    """So many of its choices, the first ones, have slots that its tier keeps under any flood:
    nothing preempts them."""

    facts: QueueFacts | None = field(default=None, compare=False)
    """For whoever explains the request. A submit carries its grant without them."""

    def to_wire(self, *, facts: bool = True) -> list[Any]:
        wire: list[Any] = [self.grant_id, self.epoch, self.replica_id, self.expiry_ms, self.kept]
        return [*wire, self.facts.to_wire()] if facts and self.facts is not None else wire

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Grant:
        grant_id, epoch, replica_id, expiry_ms, kept, *facts = wire
        return cls(
            grant_id=grant_id,
            epoch=epoch,
            replica_id=replica_id,
            expiry_ms=expiry_ms,
            kept=kept,
            facts=QueueFacts.from_wire(facts[0]) if facts else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """One client request: `n` choices over one prompt.

    `request.request_id` is the client-visible id; choice i runs as `{request_id}/{i}`.
    """

    stream_id: int
    """Chosen by the gateway, unique on its link; names the stream in every later message."""

    request: Request
    n: int = 1
    grant: Grant | None = None
    """None while the queue is away: decode's own limits decide."""

    remaining_ms: int | None = None
    """What is left of the client's deadline."""

    window_tokens: int = 1024
    """Tokens (all choices together) that decode may send ahead of the gateway's CREDIT."""

    def to_wire(self) -> list[Any]:
        return [
            Kind.SUBMIT,
            self.stream_id,
            self.request.to_wire(),
            self.n,
            self.grant.to_wire(facts=False) if self.grant else None,
            self.remaining_ms,
            self.window_tokens,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Submit:
        _, stream_id, request, n, grant, remaining_ms, window_tokens = wire
        return cls(
            stream_id=stream_id,
            request=Request.from_wire(request),
            n=n,
            grant=Grant.from_wire(grant) if grant else None,
            remaining_ms=remaining_ms,
            window_tokens=window_tokens,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its raw log-probability and the likeliest alternatives, as clients see it."""

    token_id: int
    text: bytes
    """The token's own bytes (may be a fragment of a character)."""

    logprob: float
    top: tuple[tuple[int, bytes, float], ...]
    """`(token id, bytes, logprob)`, likeliest first."""

    def to_wire(self) -> list[Any]:
        return [self.token_id, self.text, self.logprob, self.top]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> TokenLogprob:
        token_id, text, logprob, top = wire
        return cls(token_id, text, logprob, tuple((t, b, p) for t, b, p in top))


@dataclass(slots=True)
class StreamEvent:
    """What one engine step gave one choice of one stream.

    `text` may be empty while a stop string or half a character is held back. With `finish` set it
    is the choice's last event. `usage` comes once, with the last event of the last choice.
    """

    stream_id: int
    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None

    def to_wire(self) -> list[Any]:
        plain = [self.stream_id, self.choice, self.text, self.token_ids]
        if self.logprobs is None and self.finish is None and self.usage is None:
            return plain  # nearly every token
        return [
            *plain,
            [entry.to_wire() for entry in self.logprobs] if self.logprobs is not None else None,
            self.finish.value if self.finish else None,
            self.usage.to_wire() if self.usage else None,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> StreamEvent:
        if len(wire) == 4:
            return cls(*wire)
        stream_id, choice, text, token_ids, logprobs, finish, usage = wire
        return cls(
            stream_id,
            choice,
            text,
            token_ids,
            [TokenLogprob.from_wire(entry) for entry in logprobs] if logprobs is not None else None,
            FinishReason(finish) if finish else None,
            Usage.from_wire(usage) if usage else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole submit."""

    prompt_tokens: int
    completion_tokens: int
    """Over all choices."""

    cached_tokens: int
    """Prompt tokens that nobody computed for this request."""

    def to_wire(self) -> list[Any]:
        return [self.prompt_tokens, self.completion_tokens, self.cached_tokens]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Usage:
        prompt, completion, cached = wire
        return cls(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


# STEP   [Kind.STEP, [StreamEvent.to_wire(), ...]]            one frame a step and gateway
# CANCEL [Kind.CANCEL, stream_id]
# CREDIT [Kind.CREDIT, stream_id, tokens]                     consumed since the last credit
# DRAIN  [Kind.DRAIN, draining]               Serve dropped you: no new grants; or it took you back
# ALIVE  [Kind.ALIVE, [transfer, ...]]            these wait for their turn here or are computed
# AGENT  [Kind.AGENT, 0, ReplicaCard.to_wire()]  how to read blocks from this replica by NIXL
# READY  [Kind.READY, transfer, epoch, [[first_token, block, checksum or None], ...]]   read these
# HELD   [Kind.HELD, transfer]      are the blocks of this transfer still held? Same in answer: yes
# SNAPSHOT [Kind.SNAPSHOT, replica_id, role, series]        a replica's metrics, every second
# ASK    [Kind.ASK, number, what, arguments]                 for explanations; see `explain.asking`
# TELL   [Kind.TELL, number, value, clock, received_s, sent_s]
# ABANDON [Kind.ABANDON, ticket]                              no longer waiting for a grant
# RELEASE [Kind.RELEASE, grant_id]                            the request ended, whoever ended it
# GRANT  [Kind.GRANT, ticket, Grant.to_wire()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Ask the queue for a grant. Answered once, by GRANT or REFUSE with the same number."""

    ticket: int
    cost_tokens: int
    """Prompt tokens plus the output the request may take."""

    prompt_tokens: int
    n: int = 1
    priority: int = 0
    """Rank of its tier, for a queue that does not know the tier."""

    remaining_ms: int | None = None
    """What is left of the client's patience."""

    tier: str = "default"
    tenant: str = ""
    weight: float = 1.0
    """Of the tenant beside others of the tier."""

    resumed: bool = False
    """It had been admitted, and its replica was lost."""

    def to_wire(self) -> list[Any]:
        return [
            Kind.ACQUIRE,
            self.ticket,
            self.cost_tokens,
            self.prompt_tokens,
            self.n,
            self.priority,
            self.remaining_ms,
            self.tier,
            self.tenant,
            self.weight,
            self.resumed,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Acquire:
        _, ticket, cost_tokens, prompt_tokens, n, priority, remaining_ms, *fair = wire
        tier, tenant, weight, resumed = fair
        return cls(
            ticket=ticket,
            cost_tokens=cost_tokens,
            prompt_tokens=prompt_tokens,
            n=n,
            priority=priority,
            remaining_ms=remaining_ms,
            tier=tier,
            tenant=tenant,
            weight=weight,
            resumed=resumed,
        )


UNTAKABLE = -(1 << 31)
"""A level that no priority is above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A decode replica's own account, sent on connect and on change."""

    replica_id: str
    slots: int
    """Choices that may run or wait at once."""

    capacity_tokens: int
    grants: tuple[tuple[int, int, int], ...]
    """`(epoch, grant id, n)` of every submit alive here that carried a grant."""

    ungranted: int = 0
    """Choices alive here that came without a grant."""

    draining: bool = False
    held_tokens: int = 0
    """KV in use or leased, of `capacity_tokens`. Prefixes that are merely cached do not count."""

    alive: tuple[tuple[int, int | None, int, int], ...] = ()
    """What is alive here by `(priority, level)`: those two, choices, KV tokens. `level` is what has
    to be more urgent to take its slots back, the priority unless it had waited long; `UNTAKABLE`
    while nothing can; None if it may not be preempted at all, as in slots that its tier keeps."""

    prefilling_tokens: tuple[tuple[int, int], ...] = ()
    """`(priority, tokens)` of prompts whose streams have no token yet."""

    prefill_replicas: int = 0
    """Running, as this replica sees it; 0: prompts are computed on decode replicas."""

    def to_wire(self) -> list[Any]:
        return [
            Kind.REPORT,
            self.replica_id,
            self.slots,
            self.capacity_tokens,
            self.grants,
            self.ungranted,
            self.draining,
            self.held_tokens,
            self.alive,
            self.prefilling_tokens,
            self.prefill_replicas,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Report:
        _, replica_id, slots, capacity_tokens, grants, ungranted, draining, *load = wire
        held_tokens, alive, prefilling_tokens, prefill_replicas = load
        return cls(
            held_tokens=held_tokens,
            alive=tuple((p, level, n, tokens) for p, level, n, tokens in alive),
            prefilling_tokens=tuple((p, tokens) for p, tokens in prefilling_tokens),
            prefill_replicas=prefill_replicas,
            replica_id=replica_id,
            slots=slots,
            capacity_tokens=capacity_tokens,
            grants=tuple((e, g, n) for e, g, n in grants),
            ungranted=ungranted,
            draining=draining,
        )


def refusal_to_wire(number: int, error: EngineError) -> list[Any]:
    """REFUSE for stream or ticket `number`. Unknown errors travel as an internal error."""
    if isinstance(error, RequestError):
        return [Kind.REFUSE, number, "request", str(error), error.code, error.param, error.status]
    if isinstance(error, Overloaded):
        return [
            Kind.REFUSE,
            number,
            "overloaded",
            str(error),
            error.code,
            None,
            error.retry_after_s,
        ]
    if isinstance(error, TransferError):
        return [Kind.REFUSE, number, "transfer", str(error), error.stage, None, None]
    return [Kind.REFUSE, number, "internal", str(error), "internal_error", None, None]


def refusal_from_wire(wire: list[Any]) -> EngineError:
    _, _, family, message, code, param, extra = wire
    if family == "request":
        return RequestError(message, code=code, param=param, status=extra)
    if family == "overloaded":
        return Overloaded(message, code=code, retry_after_s=extra)
    if family == "transfer":
        return TransferError(message, stage=code)
    return EngineError(message)
