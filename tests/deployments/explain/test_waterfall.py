"""Waterfalls of made-up requests. Decode's clock is 1000 s ahead of the gateway's, prefill's 500 s
behind decode's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.explain.clocks import SAME, Offset
from deployments.explain.costs import Estimate
from deployments.explain.decode import ChoiceFacts, DecodeFacts, PullRecord
from deployments.explain.prefill import ChunkFacts, PrefillFacts
from deployments.explain.queueing import QueueFacts
from deployments.explain.request import ExternalSpan, Leg, Note, RequestRecord
from deployments.explain.waterfall import Phase, Waterfall, assemble
from engine.transfer.transport import TransferNote

AWAY = Offset(999.75, 1000.25)


def request(**changes: Any) -> RequestRecord:
    """Arrives at 10 and ends at 20: a second or so of everything."""
    leg = Leg(
        0,
        (0,),
        asked_s=11.0,
        granted_s=12.0,
        submitted_s=12.5,
        first_s=17.0,
        ended_s=19.0,
        replica="d1",
        stream_id=4,
        queue=QueueFacts(ahead=3, waiting=(("default", 3),), rule="most free slots"),
        end="finished",
    )
    values: dict[str, Any] = {
        "request_id": "r",
        "endpoint": "chat",
        "received_s": 10.0,
        "received_unix_s": 1_700_000_000.0,
        "model": "m",
        "stream": True,
        "read_s": 10.25,
        "tokenised_s": 10.75,
        "first_token_s": 17.0,
        "ended_s": 20.0,
        "outcome": "finished",
        "status": 200,
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "cached_tokens": 30,
        "write_s": 0.5,
        "worst_write_s": 0.25,
        "num_writes": 5,
        "legs": [leg],
    }
    return RequestRecord(**(values | changes))


def prefilled() -> PrefillFacts:
    return PrefillFacts(
        clock="p",
        asked_s=513.5,
        sent_s=515.5,
        cached_tokens=30,
        chunks=(ChunkFacts(514.75, 0.75, 40, 10), ChunkFacts(515.5, 0.75, 30, 0)),
        num_chunks=2,
        idle=Estimate(0.5, "alone", 9),
    )


def pulled(**changes: Any) -> DecodeFacts:
    """Submit at decode 1013, reserved and pulled from 1013.25, KV there at 1016.5."""
    note = TransferNote(
        asked_s=1013.5,
        first_byte_s=1015.0,
        final_s=1015.5,
        bytes_at_final=700,
        told=prefilled().to_wire(),
    )
    pull = PullRecord("p1", 1013.25, scores=(("p1", 0.0),), note=note, ended_s=1016.5)
    pull.num_bytes = 1000
    choice = ChoiceFacts(
        choice=0, num_tokens=5, first_s=1016.5, last_s=1018.5, mean_gap_s=0.5, worst_gap_s=0.75
    )
    values: dict[str, Any] = {
        "replica": "d1",
        "clock": "d",
        "request_id": "r",
        "stream_id": 4,
        "salt": "",
        "begun_s": 1013.0,
        "reserved_s": 1013.25,
        "first_sent_s": 1016.5,
        "ended_s": 1018.5,
        "outcome": "finished",
        "decision": "disaggregated",
        "pulls": (pull,),
        "choices": (choice,),
        "idle_step": Estimate(0.1, "alone", 20),
        "idle_transfer_s": 0.25,
        "local_tokens": 10,
    }
    return DecodeFacts(**(values | changes))


def told(record: RequestRecord, facts: DecodeFacts | None, away: Offset | None = AWAY) -> Waterfall:
    journals = {} if facts is None else {("d1", 4): (facts, away)}
    return assemble(record, journals, 99.0)


def spans(waterfall: Waterfall) -> list[tuple[str, str, float]]:
    return [(s.name, s.where, s.duration_s) for s in waterfall.segments]


def test_every_station_of_a_prompt_computed_elsewhere_has_its_time() -> None:
    waterfall = told(request(), pulled())
    assert spans(waterfall) == [
        ("read", "client", 0.25),
        ("tokenize", "gateway", 0.5),
        ("queue", "gateway", 0.25),
        ("queue", "queue", 1.0),
        ("route", "gateway", 0.5),
        ("link", "gateway", 0.5),
        ("decode_queue", "d1", 0.25),
        # The pull's own exchange: asked 1013.5/513.5, final 515.5/1015.5, so exactly 500 s.
        ("link", "d1", 0.25),
        ("prefill_queue", "p1", 0.5),
        ("prefill", "p1", 1.5),
        ("kv_transfer", "p1", 1.0),
        ("link", "gateway", 0.5),
        ("decode", "d1", 2.0),
        ("deliver", "gateway", 0.5),
        ("stream", "client", 0.5),
    ]
    assert waterfall.total_s == 10.0
    assert (waterfall.accounted, waterfall.unaccounted_s) == (1.0, 0.0)
    assert waterfall.clock_uncertainty_s == 0.25
    assert (waterfall.complete, waterfall.ends_s) == (True, 10.0)


def test_the_phase_that_took_the_most_is_named_and_the_one_most_delayed() -> None:
    waterfall = told(request(), pulled())
    assert waterfall.dominant is Phase.DECODE
    assert waterfall.phases[Phase.DECODE] == 2.25
    # Alone, four more tokens would have taken 0.4 s, the prompt 0.5, the transfer 0.25.
    idle = waterfall.idle
    assert idle is not None
    assert idle.phases == {
        Phase.CLIENT: 0.25,
        Phase.TOKENIZE: 0.5,
        Phase.STREAM: 1.5,
        Phase.PREFILL: 0.5,
        Phase.TRANSFER: 0.25,
        Phase.DECODE: pytest.approx(0.4),
    }
    assert next(iter(waterfall.delays)) is Phase.DECODE
    assert waterfall.delays[Phase.QUEUE] == 1.25


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        (Phase.QUEUE, {"granted_s": 21.0}),
        (Phase.ROUTE, {"submitted_s": 22.0}),
    ],
)
def test_a_late_station_of_the_gateway_is_named(phase: Phase, change: dict[str, float]) -> None:
    record = request(ended_s=30.0, first_token_s=27.0)
    for name in ("granted_s", "submitted_s", "first_s", "ended_s"):
        late = getattr(record.legs[0], name) + (10.0 if name != "granted_s" else 0.0)
        setattr(record.legs[0], name, late)
    for name, at_s in change.items():
        setattr(record.legs[0], name, at_s)
    facts = pulled()
    later = Offset(AWAY.low_s - 10.0, AWAY.high_s - 10.0)  # all of decode happens 10 s later
    assert told(record, facts, later).dominant is phase


def test_a_prompt_computed_at_decode_waits_there_and_is_computed_there() -> None:
    chunks = (ChunkFacts(1014.0, 0.5, 32, 3), ChunkFacts(1015.5, 0.5, 20, 3))
    choice = ChoiceFacts(choice=0, num_tokens=5, first_s=1015.5, last_s=1018.5)
    facts = pulled(pulls=(), chunks=chunks, num_chunks=2, choices=(choice,), first_sent_s=1015.5)
    waterfall = told(request(), facts)
    assert spans(waterfall)[5:] == [
        ("link", "gateway", 0.5),
        ("decode_queue", "d1", 0.5),
        ("prefill", "d1", 2.0),
        ("link", "gateway", 1.5),
        ("decode", "d1", 2.5),
        ("stream", "client", 0.5),
    ]
    assert waterfall.details["prefix"] == {
        "prompt_tokens": 100,
        "local_hit_tokens": 10,
        "remote_hit_tokens": 0,
        "computed_tokens": 52,
    }


def test_a_replica_whose_journal_is_gone_leaves_its_time_unaccounted() -> None:
    waterfall = told(request(), None)
    assert waterfall.unaccounted_s == 4.5
    assert waterfall.accounted == pytest.approx(0.55)
    assert waterfall.dominant is Phase.DECODE  # of what has a name
    assert waterfall.idle is None
    assert waterfall.details["submits"][0]["journal"] is False


def test_a_transfer_that_failed_counts_where_it_failed() -> None:
    facts = pulled()
    failed = PullRecord("p0", 1013.0, ended_s=1013.25, error="stall")
    waterfall = told(request(), replace(facts, pulls=(failed, *facts.pulls)))
    assert ("failed_pull", "p0", 0.25) in spans(waterfall)
    assert waterfall.phases[Phase.TRANSFER] == 1.25
    assert waterfall.details["failed_pulls"] == [
        {"replica": "p0", "stage": "stall", "seconds": 0.25}
    ]


def test_a_lost_replica_and_what_came_after_it_are_told_apart() -> None:
    record = request()
    lost = replace(
        record.legs[0], replica="d0", stream_id=1, ended_s=14.0, first_s=13.0, end="lost", why="it"
    )
    record.legs[0] = replace(
        record.legs[0], asked_s=15.0, granted_s=15.25, submitted_s=15.5, first_s=17.0
    )
    record.legs.insert(0, lost)
    record.first_token_s = 13.0
    facts = pulled(begun_s=1015.75, pulls=(), first_sent_s=1016.75)
    waterfall = told(record, facts)
    assert spans(waterfall)[5:] == [
        ("prefill", "d0", 0.5),  # its journal died with it: the gateway's own view
        ("decode", "gateway", pytest.approx(13 / 14)),
        ("stream", "client", pytest.approx(1 / 14)),
        ("recovery", "gateway", 1.0),
        ("queue", "queue", 0.25),
        ("route", "gateway", 0.25),
        ("link", "gateway", 0.25),
        ("decode_queue", "d1", 1.0),
        ("link", "gateway", 0.25),
        ("decode", "d1", 2.0),
        ("deliver", "gateway", pytest.approx(1 - 3 / 14)),
        ("stream", "client", pytest.approx(3 / 14)),
    ]
    assert waterfall.details["migrations"] == [
        {"replica": "d0", "why": "it", "at_s": 4.0, "to": "d1"}
    ]


def test_a_replica_lost_before_its_first_token_did_its_work_for_nothing() -> None:
    record = request()
    lost = replace(record.legs[0], replica="d0", stream_id=1, ended_s=14.0, first_s=0.0, end="lost")
    record.legs[0] = replace(record.legs[0], asked_s=14.0, granted_s=14.0, submitted_s=14.0)
    record.legs.insert(0, lost)
    assert ("lost", "d0", 1.5) in spans(told(record, pulled(begun_s=1014.0)))


def test_a_request_that_never_left_the_queue_was_in_the_queue() -> None:
    leg = Leg(0, (0,), asked_s=11.0, ended_s=19.5, end="refused", why="queue_timeout")
    record = request(legs=[leg], first_token_s=0.0, outcome="failed", status=429)
    waterfall = told(record, None)
    assert waterfall.phases == {
        Phase.QUEUE: 8.75,
        Phase.TOKENIZE: 0.5,
        Phase.ROUTE: 0.5,
        Phase.CLIENT: 0.25,
    }
    assert (waterfall.accounted, waterfall.dominant) == (1.0, Phase.QUEUE)


def test_a_slow_reader_takes_the_time_from_decode_and_not_the_other_way_round() -> None:
    waterfall = told(request(write_s=2.75), pulled())
    assert (waterfall.phases[Phase.STREAM], waterfall.phases[Phase.DECODE]) == (3.25, 0.5)
    assert waterfall.dominant is Phase.STREAM


def test_what_the_client_did_before_comes_first_and_the_latest_begun_has_the_time() -> None:
    tools = (
        ExternalSpan(name="plan", kind="tool", before_s=8.0, duration_s=6.0),
        ExternalSpan(name="search", kind="retrieval", before_s=5.0, duration_s=1.0),
    )
    waterfall = told(request(spans=tools), pulled())
    assert [(s.name, s.phase.value, s.start_s, s.duration_s) for s in waterfall.segments[:4]] == [
        ("plan", "tool", -8.0, 3.0),
        ("search", "retrieval", -5.0, 1.0),
        ("plan", "tool", -4.0, 2.0),
        ("client", "client", -2.0, 2.0),
    ]
    assert waterfall.dominant is Phase.TOOL
    assert (waterfall.total_s, waterfall.ends_s) == (18.0, 10.0)
    answer = waterfall.to_json()
    assert (answer["external_s"], answer["duration_s"]) == (8.0, 10.0)


def test_a_request_that_runs_is_told_as_far_as_it_is() -> None:
    record = request(ended_s=0.0, outcome="open")
    record.legs[0].ended_s = 0.0
    record.legs[0].end = ""
    waterfall = assemble(record, {("d1", 4): (pulled(ended_s=0.0), AWAY)}, 18.0)
    assert (waterfall.complete, waterfall.ends_s, waterfall.total_s) == (False, 8.0, 8.0)


def test_notes_of_what_was_done_to_a_request_are_told() -> None:
    record = request(notes=[Note(12.0, "degraded", {"action": "shorter answer"})])
    assert told(record, pulled()).details["degradations"] == [
        {"at_s": 2.0, "kind": "degraded", "action": "shorter answer"}
    ]


def test_the_answer_has_every_section_and_plain_rounded_numbers() -> None:
    answer = told(request(), pulled()).to_json()
    assert answer["dominant_phase"] == "decode"
    assert answer["queue"] == {
        "waited_s": 1.0,
        "without_queue": False,
        "at_arrival": {"ahead": 3, "waiting": {"default": 3}},
        "granted_before": {},
    }
    assert answer["transfer"] == {
        "replica": "p1",
        "bytes": 1000,
        "hidden_bytes": 700,
        "hidden_s": 0.5,
        "exposed_s": 1.0,
        "alone": False,
    }
    assert answer["prefill"]["chunks"][0] == {
        "start_s": 0.5,
        "duration_s": 0.75,
        "tokens": 40,
        "other_tokens": 10,
    }
    assert answer["prefix"] == {
        "prompt_tokens": 100,
        "local_hit_tokens": 10,
        "remote_hit_tokens": 20,
        "computed_tokens": 70,
    }
    assert answer["idle"]["slowdown"] == pytest.approx(10.0 / 3.4, abs=1e-6)


times = st.floats(0, 100, allow_nan=False)


@given(
    marks=st.lists(times, min_size=8, max_size=8),
    decode=st.lists(times, min_size=6, max_size=6),
    low=st.floats(-5, 5),
    width=st.floats(0, 5),
    write_s=times,
)
def test_whatever_the_clocks_say_the_segments_never_overlap_or_leave_a_gap(
    marks: list[float], decode: list[float], low: float, width: float, write_s: float
) -> None:
    received, read, tokenised, asked, granted, submitted, first, ended = marks
    record = request(
        received_s=min(received, ended),
        read_s=read,
        tokenised_s=tokenised,
        first_token_s=first,
        ended_s=max(received, ended) or 1.0,
        write_s=write_s,
    )
    leg = replace(
        record.legs[0],
        asked_s=asked,
        granted_s=granted,
        submitted_s=submitted,
        first_s=first,
        ended_s=ended,
    )
    record.legs[:] = [leg]
    begun, pull_at, final, pull_end, sent, last = decode
    facts = pulled(begun_s=begun, first_sent_s=sent)
    facts.pulls[0].began_s, facts.pulls[0].ended_s = pull_at, pull_end
    facts.pulls[0].note.final_s = final
    choice = ChoiceFacts(choice=0, num_tokens=2, first_s=min(sent, last), last_s=max(sent, last))
    facts = replace(facts, choices=(choice,))
    waterfall = assemble(record, {("d1", 4): (facts, Offset(low, low + width))}, 0.0)
    at_s = 0.0
    for segment in waterfall.segments:
        assert segment.start_s == pytest.approx(at_s)
        assert segment.duration_s > 0
        at_s = segment.start_s + segment.duration_s
    assert waterfall.segments == () or at_s == pytest.approx(waterfall.ends_s)
    waterfall.to_json()


def test_equal_clocks_have_no_uncertainty() -> None:
    facts = replace(pulled(), pulls=())
    assert told(request(), facts, SAME).clock_uncertainty_s == 0.0
