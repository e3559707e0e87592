"""One rank: holds its shard of weights and KV, computes the plans that its coordinator sends.

It lives as long as its coordinator: a thread sends a beat each second, and a beat that cannot be
sent ends the process, whatever it is doing.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from engine.execution.copies import make_copies
from engine.execution.inputs import step_inputs
from engine.execution.micro import micro_batches
from engine.execution.pool import KVPool
from engine.execution.ranks.channel import Channel, ChannelError, Kind, connect
from engine.execution.ranks.group import RankGroup
from engine.execution.ranks.memory import serve_memory
from engine.execution.ranks.wire import (
    PlanReader,
    RankOrder,
    RankReady,
    machine,
    ready_to_wire,
    tokens_to_wire,
)
from engine.models.load import load_shard
from engine.models.model import KVLayout, KVPart
from engine.models.shard import Grid, Shard
from engine.request import SampledToken
from engine.sampling.batched import BatchedSampler
from engine.sampling.sampler import Sampler, UnusableLogits
from engine.scheduling.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.models.decoder import Decoder

logger = logging.getLogger(__name__)

BEAT_S = 1.0
_ORPHANED = 3
"""Exit status of a rank whose coordinator is gone."""


class RankWorker:
    """Computes steps. Everything but beats and memory happens on the calling thread."""

    def __init__(self, model: Decoder, shard: Shard, group: RankGroup, pool: KVPool) -> None:
        self._model = model
        self._shard = shard
        self._group = group
        self._pool = pool
        self._sampler: Sampler | None = None
        if shard.rank == shard.grid.sampling_rank:
            kind = BatchedSampler if model.device.type == "cuda" else Sampler
            self._sampler = kind(model.vocab_size, model.eos_token_ids)

    def execute(self, plan: StepPlan, *, cut: bool = True) -> dict[str, SampledToken] | None:
        """This rank's part of a step; the tokens on the sampling rank.

        cut: in micro-batches, since no other step keeps the stages busy. Returns once this rank's
        KV of the step is in its pool. Raises UnusableLogits there.
        """
        if self._sampler is not None:
            for request_id in plan.left:
                self._sampler.leave(request_id)
            for entered in plan.entered:
                self._sampler.enter(
                    entered.request_id, entered.params, entered.token_ids, entered.num_prompt_tokens
                )
        if not plan.chunks:
            return None if self._sampler is None else {}
        with torch.inference_mode():
            make_copies(self._pool, plan.copies)
            logits = self._compute(plan, cut)
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)  # KV is read by others from here on
            if self._sampler is None:
                return None
            sampled = [chunk for chunk in plan.chunks if chunk.sample]
            request_ids = [chunk.request_id for chunk in sampled]
            if not sampled:
                return {}
            # Rows of all micro-batches at once: if one is unusable, none has been counted.
            tokens = self._sampler.sample(
                torch.cat(logits), request_ids, [chunk.end for chunk in sampled]
            )
        return dict(zip(request_ids, tokens, strict=True))

    def _compute(self, plan: StepPlan, cut: bool) -> list[torch.Tensor]:
        """Every micro-batch through this stage. Logits on the sampling rank, else nothing."""
        model, shard, group = self._model, self._shard, self._group
        out: list[torch.Tensor] = []
        for chunks in micro_batches(plan, shard.grid.pipeline_parallel if cut else 1):
            ids, positions, step = step_inputs(
                StepPlan(chunks=chunks), self._pool.block_tokens, model.device
            )
            hidden = None
            if not shard.is_first_stage:
                hidden = group.receive(ids.shape[0], model.hidden_size, getattr(torch, model.dtype))
            hidden = model.hidden(ids, positions, self._pool, step, hidden)
            if not shard.is_last_stage:
                group.send_on(hidden)
                continue
            logits = model.logits(hidden)
            if logits is not None:
                out.append(logits)
        group.end_step()
        return out


class _EmptyWorker:
    """Computes nothing: what is left is the cost of the channel."""

    def __init__(self, order: RankOrder) -> None:
        self._samples = order.rank == order.grid.sampling_rank

    def execute(self, plan: StepPlan, *, cut: bool = True) -> dict[str, SampledToken] | None:
        if not self._samples:
            return None
        return {chunk.request_id: SampledToken(0) for chunk in plan.chunks if chunk.sample}


def serve_rank(order: RankOrder) -> NoReturn:
    """Come up and compute until the coordinator is gone (ChannelError). Raises its own failure,
    which the coordinator has been told."""
    key = bytes.fromhex(order.key)
    channel = connect(order.address, key, order.rank, "steps")
    beats = threading.Thread(target=_beat, args=(channel,), name="beats", daemon=True)
    beats.start()
    try:
        if order.model is None:
            _serve_empty(order, channel)
        else:
            _serve(order, channel, key)
    except ChannelError:
        raise
    except Exception as error:
        logger.exception("rank %d cannot go on", order.rank)
        channel.send([Kind.FAILED, f"{type(error).__name__}: {error}"])
        raise


def _serve(order: RankOrder, channel: Channel, key: bytes) -> NoReturn:
    assert order.model is not None
    torch.set_num_threads(order.num_threads)
    device = torch.device(order.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup(
        order.grid, order.rank, order.store, device=device, limit_s=order.start_limit_s
    )
    began = time.monotonic()
    model = load_shard(order.model, order.grid, order.rank, group=group, device=device)
    shard = model.shard
    ready = RankReady(
        pid=os.getpid(),
        host=machine(),
        on_host=device.type == "cpu",
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_context_tokens,
        eos_token_ids=model.eos_token_ids,
        layers=shard.layers,
        kv_heads=shard.kv_heads,
        owned_kv_heads=shard.owned_kv_heads,
        layout=model.layout,
        weight_bytes=model.weight_bytes,
        load_s=time.monotonic() - began,
        free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
    )
    channel.send([Kind.READY, *ready_to_wire(ready)])
    message = channel.receive()
    if message[0] != Kind.ALLOCATE or len(message) != 3:
        raise ChannelError(f"malformed frame: kind {message[0]} where ALLOCATE was due")
    _, num_blocks, shared = message
    pool = _pool(model.layout, num_blocks, order.block_tokens, device, shared)
    if device.type == "cuda":
        from engine.execution.gpu import choose_attention

        choose_attention(
            model,
            block_tokens=order.block_tokens,
            kv_dtype=model.layout.dtype,
            wanted=order.model.attention,
            graphs=False,
        )
    if shared is None:
        memory = connect(order.address, key, order.rank, "memory")
        threading.Thread(
            target=serve_memory, args=(memory, pool), name="memory", daemon=True
        ).start()
    if order.kv_reads:
        _open_reads(connect(order.address, key, order.rank, "reads"), pool, shard)
    channel.send([Kind.ALLOCATED])
    _loop(channel, RankWorker(model, shard, group, pool), order.grid)


def _open_reads(channel: Channel, pool: KVPool, shard: Shard) -> None:
    """Hear on a thread what to read; the agent is made when the coordinator asks for it."""
    from engine.execution.ranks.reads import serve_reads

    held = KVPart(shard.layers, shard.kv_heads)
    threading.Thread(
        target=serve_reads,
        args=(channel, pool, held, shard.owned_kv_heads),
        name="reads",
        daemon=True,
    ).start()


def _serve_empty(order: RankOrder, channel: Channel) -> NoReturn:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", fingerprint="")
    ready = RankReady(
        pid=os.getpid(),
        host=machine(),
        on_host=True,
        dtype="float32",
        vocab_size=1,
        max_context_tokens=1 << 20,
        eos_token_ids=(),
        layers=(0, 1),
        kv_heads=(0, 1),
        owned_kv_heads=(0, 1 if order.rank == 0 else 0),
        layout=layout,
        weight_bytes=0,
        load_s=0.0,
    )
    channel.send([Kind.READY, *ready_to_wire(ready)])
    channel.receive()
    channel.send([Kind.ALLOCATED])
    _loop(channel, _EmptyWorker(order), order.grid)


def _loop(channel: Channel, worker: RankWorker | _EmptyWorker, grid: Grid) -> NoReturn:
    plans = PlanReader()
    receive = channel.receive
    if grid.pipeline_parallel > 1:  # several plans at a time
        receive = _read_ahead(channel)
    while True:
        message = receive()
        if message[0] != Kind.STEP or len(message) != 4:
            raise ChannelError(f"malformed frame: kind {message[0]} where STEP was due")
        _, number, wire, cut = message
        plan = plans.from_wire(wire)
        try:
            tokens = worker.execute(plan, cut=cut)
        except UnusableLogits as error:
            channel.send([Kind.UNUSABLE, number, error.request_id, error.position, error.largest])
            continue
        channel.send([Kind.DONE, number, None if tokens is None else tokens_to_wire(tokens)])


def _read_ahead(channel: Channel) -> Callable[[], list[Any]]:
    """`channel.receive`, from a thread that reads while a step is computed: who sends the next plan
    must not wait for that, and be taken for a rank that hangs."""
    read: queue.SimpleQueue[list[Any] | ChannelError] = queue.SimpleQueue()

    def run() -> None:
        try:
            while True:
                read.put(channel.receive())
        except ChannelError as error:
            read.put(error)

    def receive() -> list[Any]:
        message = read.get()
        if isinstance(message, ChannelError):
            raise message
        return message

    threading.Thread(target=run, name="plans", daemon=True).start()
    return receive


def _pool(
    layout: KVLayout, num_blocks: int, block_tokens: int, device: torch.device, shared: str | None
) -> KVPool:
    """`shared`: a file of the coordinator's memory to keep the pool in, so that it can move KV."""
    if shared is None:
        return KVPool(layout, num_blocks, block_tokens, device)
    descriptor = os.open(shared, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return KVPool(layout, num_blocks, block_tokens, memory=memory)


def _beat(channel: Channel) -> None:
    while True:
        time.sleep(BEAT_S)
        try:
            channel.send([Kind.BEAT])
        except ChannelError:
            # It may be deep in an operation that waits for a rank that is gone as well.
            os._exit(_ORPHANED)


def main() -> None:
    """Entry of a rank that is a plain process: its order is one line of JSON on standard input."""
    logging.basicConfig(level=logging.INFO)
    order = RankOrder.from_json(json.loads(sys.stdin.readline()))
    try:
        serve_rank(order)
    except ChannelError as error:
        logger.warning("rank %d ends: %s", order.rank, error)
        os._exit(_ORPHANED)
    except Exception:
        os._exit(1)  # said already; other ranks' connections must not keep it


if __name__ == "__main__":
    main()
