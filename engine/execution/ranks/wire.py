"""Plans, results and what a rank is told and tells, as plain lists, and back."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import wraps
from typing import Any, TypeVar

from engine.cache.blocks import BlockCopy
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.execution.ranks.channel import ChannelError
from engine.models.model import KVLayout
from engine.models.shard import Grid
from engine.request import SampledToken, SamplingParams
from engine.scheduling.plan import Chunk, Entered, StepPlan

T = TypeVar("T")


def _strict(read: Callable[[list[Any]], T]) -> Callable[[list[Any]], T]:
    """A reader whose every complaint about its input is a ChannelError."""

    @wraps(read)
    def checked(wire: list[Any]) -> T:
        try:
            return read(wire)
        except (EngineError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as e:
            raise ChannelError(
                f"malformed {read.__name__.strip('_').removesuffix('_from_wire')}: {e}"
            ) from e

    return checked


def pack_ints(values: tuple[int, ...]) -> bytes:
    """Little-endian int32: a list of so many numbers costs msgpack ten times as much."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_ints`. Raises ValueError."""
    values = array("i")
    values.frombytes(data)
    return tuple(values)


class PlanWriter:
    """Plans as lists, for one channel or several that get the same.

    Block tables grow at their ends only: of a request that was in an earlier plan, what came since
    is sent.
    """

    def __init__(self) -> None:
        self._tables: dict[str, tuple[int, ...]] = {}

    def to_wire(self, plan: StepPlan) -> list[Any]:
        """Everything that a rank derives a pass from; what only the engine reads stays behind.

        Each plan must be sent, in this order.
        """
        for request_id in plan.left:
            self._tables.pop(request_id, None)
        return [
            plan.left,
            [
                (
                    entered.request_id,
                    entered.params.to_wire(),
                    pack_ints(entered.token_ids),
                    entered.num_prompt_tokens,
                )
                for entered in plan.entered
            ],
            [
                (
                    chunk.request_id,
                    chunk.first_token,
                    pack_ints(chunk.token_ids),
                    *self._blocks(chunk),
                    chunk.sample,
                )
                for chunk in plan.chunks
            ],
            [(copy.source, copy.target, copy.num_tokens) for copy in plan.copies],
        ]

    def _blocks(self, chunk: Chunk) -> tuple[int, bytes]:
        """How many of the table's blocks the ranks know, and the rest."""
        blocks = chunk.blocks
        known = self._tables.get(chunk.request_id, ())
        if blocks is not known:
            self._tables[chunk.request_id] = blocks
            if blocks[: len(known)] != known:
                known = ()
        if len(known) == len(blocks):
            return len(known), b""
        return len(known), pack_ints(blocks[len(known) :])


class PlanReader:
    """What `PlanWriter` wrote, in the same order."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[int, ...]] = {}

    def from_wire(self, wire: list[Any]) -> StepPlan:
        """Raises ChannelError for what is no plan."""
        return _plan_from_wire([wire, self._tables])


@_strict
def _plan_from_wire(arguments: list[Any]) -> StepPlan:
    (left, entered, chunks, copies), tables = arguments
    for request_id in left:
        tables.pop(_text(request_id), None)
    plan = StepPlan(
        chunks=tuple(
            Chunk(
                request_id=_text(request_id),
                first_token=_whole(first_token),
                token_ids=unpack_ints(token_ids),
                blocks=_table(tables, request_id, known, rest),
                sample=_flag(sample),
            )
            for request_id, first_token, token_ids, known, rest, sample in chunks
        ),
        entered=tuple(
            Entered(
                request_id=_text(request_id),
                params=SamplingParams.from_wire(params),
                token_ids=unpack_ints(token_ids),
                num_prompt_tokens=_whole(num_prompt_tokens),
            )
            for request_id, params, token_ids, num_prompt_tokens in entered
        ),
        left=tuple(left),
        copies=tuple(
            BlockCopy(_whole(source), _whole(target), _whole(num_tokens))
            for source, target, num_tokens in copies
        ),
    )
    for chunk in plan.chunks:
        if not chunk.token_ids:
            raise ValueError(f"an empty chunk of request {chunk.request_id}")
    return plan


def _table(
    tables: dict[str, tuple[int, ...]], request_id: str, known: int, rest: bytes
) -> tuple[int, ...]:
    old = tables.get(request_id, ())
    if _whole(known) == len(old) and not rest:
        return old
    if not 0 <= known <= len(old):
        raise ValueError(f"{known} blocks of request {request_id} that were never sent")
    table = tables[request_id] = old[:known] + unpack_ints(rest)
    return table


def tokens_to_wire(tokens: Mapping[str, SampledToken]) -> list[Any]:
    return [(request_id, token.to_wire()) for request_id, token in tokens.items()]


@_strict
def tokens_from_wire(wire: list[Any]) -> dict[str, SampledToken]:
    """Inverse of `tokens_to_wire`. Raises ChannelError."""
    return {_text(request_id): SampledToken.from_wire(token) for request_id, token in wire}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """All that a rank needs to come up. It reaches the process by whoever starts it."""

    rank: int
    grid: Grid
    address: str
    """Of the coordinator's `Listener`."""

    key: str
    """Hex; proves both sides to each other. Not written anywhere."""

    store: str
    """`host:port` of the coordinator's TCPStore, where the ranks find each other."""

    model: ModelConfig | None
    """None: an empty model, whose steps compute nothing (for measuring the channel)."""

    block_tokens: int
    num_threads: int
    device: str
    """`cpu`, or a CUDA device as this process numbers them."""

    start_limit_s: float
    kv_reads: bool = False
    """It is to read KV of other replicas, or they its: it opens a read channel."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankOrder:
        model = values["model"]
        known: dict[str, Any] = dict(values)
        known["grid"] = Grid(**values["grid"])
        known["model"] = None if model is None else ModelConfig(**model)
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """What a rank says of itself once its weights are loaded."""

    pid: int
    host: str
    """Of its machine: only where it is the coordinator's can memory be shared."""

    on_host: bool
    """Its KV lies in host memory, not in a device's."""

    dtype: str
    """Of activations."""

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    owned_kv_heads: tuple[int, int]
    layout: KVLayout
    """Of this rank's part."""

    weight_bytes: int
    load_s: float
    free_bytes: int | None = None
    """Of its device, beside the weights. None: it keeps KV in host memory."""


def machine() -> str:
    """Tells one machine (and one container on it) from another."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def ready_to_wire(ready: RankReady) -> list[Any]:
    values = {field.name: getattr(ready, field.name) for field in fields(ready)}
    return [{**values, "layout": asdict(ready.layout)}]


@_strict
def ready_from_wire(wire: list[Any]) -> RankReady:
    """Inverse of `ready_to_wire`. Raises ChannelError."""
    (values,) = wire
    known: dict[str, Any] = dict(values)
    known["layout"] = KVLayout(**values["layout"])
    for name in ("eos_token_ids", "layers", "kv_heads", "owned_kv_heads"):
        known[name] = tuple(_whole(item) for item in known[name])
    return RankReady(**known)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not text")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value
