"""Plans and tokens over the channel, and what is no plan."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.blocks import BlockCopy
from engine.config import ModelConfig
from engine.execution.ranks.channel import ChannelError
from engine.execution.ranks.wire import (
    PlanReader,
    PlanWriter,
    RankOrder,
    RankReady,
    ready_from_wire,
    ready_to_wire,
    tokens_from_wire,
    tokens_to_wire,
)
from engine.models.model import KVLayout
from engine.models.shard import Grid
from engine.request import SampledToken, SamplingParams
from engine.scheduling.plan import Chunk, Entered, StepPlan

PLAN = StepPlan(
    chunks=(
        Chunk(request_id="a/0", first_token=16, token_ids=(5, 151_935), blocks=(7, 3), sample=True),
        Chunk(request_id="b", first_token=0, token_ids=(1,) * 300, blocks=(2,) * 19, sample=False),
    ),
    entered=(
        Entered(
            request_id="b",
            params=SamplingParams(
                max_tokens=9, seed=2**64 - 1, temperature=0.5, logit_bias=((3, -1.5),), stop=("x",)
            ),
            token_ids=(1,) * 300,
            num_prompt_tokens=299,
        ),
    ),
    left=("c", "b"),
    copies=(BlockCopy(3, 4, 2),),
)


def over_the_wire(value):
    return msgpack.unpackb(msgpack.packb(value))


def test_a_plan_arrives_as_it_was():
    assert PlanReader().from_wire(over_the_wire(PlanWriter().to_wire(PLAN))) == PLAN


def chunk(name, blocks):
    return Chunk(request_id=name, first_token=0, token_ids=(1,), blocks=tuple(blocks), sample=True)


tables = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abc"), tables, max_size=3),
            st.lists(st.sampled_from("abc"), max_size=2),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_block_tables_arrive_whole_however_they_grow_or_change(steps, grow):
    writer, reader = PlanWriter(), PlanReader()
    grown = {}
    for blocks, left in steps:
        for name in left:
            grown.pop(name, None)
        if grow:
            blocks = {name: grown.get(name, []) + more for name, more in blocks.items()}
            grown |= blocks
        plan = StepPlan(
            chunks=tuple(chunk(name, table) for name, table in blocks.items()), left=tuple(left)
        )
        assert reader.from_wire(over_the_wire(writer.to_wire(plan))) == plan


def test_a_table_that_grew_is_not_sent_again():
    writer = PlanWriter()
    writer.to_wire(StepPlan(chunks=(chunk("a", range(1000)),)))
    again = over_the_wire(writer.to_wire(StepPlan(chunks=(chunk("a", range(1001)),))))
    assert again[2][0][3:5] == [1000, (1000).to_bytes(4, "little")]
    with pytest.raises(ChannelError, match="1000 blocks of request a that were never sent"):
        PlanReader().from_wire(again)


def test_tokens_arrive_as_they_were():
    tokens = {"a": SampledToken(7, -0.25, ((7, -0.25), (9, -1.5))), "b": SampledToken(0)}
    assert tokens_from_wire(over_the_wire(tokens_to_wire(tokens))) == tokens


def test_orders_and_answers_arrive_as_they_were():
    order = RankOrder(
        rank=1,
        grid=Grid(tensor_parallel=2),
        address="unix:x",
        key="00",
        store="127.0.0.1:1",
        model=ModelConfig(name="m", source="tiny"),
        block_tokens=16,
        num_threads=1,
        device="cpu",
        start_limit_s=5.0,
    )
    assert RankOrder.from_json(over_the_wire(order.to_json())) == order
    ready = RankReady(
        pid=1,
        host="h",
        on_host=True,
        dtype="float64",
        vocab_size=260,
        max_context_tokens=4096,
        eos_token_ids=(2, 3),
        layers=(0, 3),
        kv_heads=(0, 1),
        owned_kv_heads=(0, 1),
        layout=KVLayout(
            num_layers=3, num_kv_heads=1, head_dim=16, dtype="float64", fingerprint="f"
        ),
        weight_bytes=1,
        load_s=0.5,
    )
    assert ready_from_wire(over_the_wire(ready_to_wire(ready))) == ready


def edited(edit):
    wire = over_the_wire(PlanWriter().to_wire(PLAN))
    edit(wire)
    return wire


@pytest.mark.parametrize(
    "wire",
    [
        edited(lambda w: w.pop()),
        edited(lambda w: w[2][0].append(1)),
        edited(lambda w: w[2][0].__setitem__(0, 7)),
        edited(lambda w: w[2][0].__setitem__(1, 1.5)),
        edited(lambda w: w[2][0].__setitem__(2, b"abc")),
        edited(lambda w: w[2][0].__setitem__(2, b"")),
        edited(lambda w: w[2][0].__setitem__(3, -1)),
        edited(lambda w: w[2][0].__setitem__(5, 1)),
        edited(lambda w: w[1][0][1].__setitem__(0, 0)),
        edited(lambda w: w[1][0][1].pop()),
        edited(lambda w: w.__setitem__(0, 5)),
        edited(lambda w: w[3][0].append(1)),
    ],
)
def test_what_is_no_plan_is_refused(wire):
    with pytest.raises(ChannelError, match="malformed plan"):
        PlanReader().from_wire(wire)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-10, 10)
        | st.binary(max_size=8)
        | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4),
    )
)
def test_any_value_is_a_plan_or_refused(wire):
    with contextlib.suppress(ChannelError):
        PlanReader().from_wire(wire)
