from __future__ import annotations

import json

import msgpack
import pytest

from deployments.explain.costs import StepCosts
from deployments.explain.decode import DecodeFacts, DecodeJournal, DecodeRecord, PullRecord
from deployments.explain.prefill import MAX_CHUNKS, ChunkFacts, ChunkLog, PrefillFacts
from deployments.explain.steps import StepRing


def told(record: DecodeRecord, steps: StepRing | None = None) -> DecodeFacts:
    return record.fold(steps or StepRing(8), StepCosts(), replica="d1")


def test_gaps_are_summed_up_and_the_steps_that_made_them_known() -> None:
    record, steps = DecodeRecord("r", 1, "", 0.0), StepRing(64)
    times = record.times(0)
    for i in range(10):
        at = 1.0 + 0.1 * i
        steps.add(at, 0.05, 4, 2)
        times.append(at)
    (choice,) = told(record, steps).choices
    assert (choice.num_tokens, choice.num_stalls, choice.mean_rows) == (10, 0, 2.0)
    assert choice.mean_gap_s == pytest.approx(0.1)
    assert choice.step_s == pytest.approx(0.45)


def stalled(steps: StepRing, record: DecodeRecord) -> tuple[str, int, int, int]:
    """Tokens every 10 ms but for one gap from 1.09 to 1.5."""
    times = record.times(0)
    for i in range(10):
        times.append(1.0 + 0.01 * i)
    times.append(1.5)
    (choice,) = told(record, steps).choices
    (stall,) = choice.stalls
    assert (stall.at_s, stall.gap_s) == (pytest.approx(1.09), pytest.approx(0.41))
    return stall.cause, stall.steps, stall.prompt_tokens, stall.prompts


def test_a_stall_in_one_long_step_tells_what_shared_the_step() -> None:
    steps = StepRing(8)
    steps.add(1.5, 0.4, 513, 1, prompts=2, prompt_tokens=512)
    assert stalled(steps, DecodeRecord("r", 1, "", 0.0)) == ("slow_step", 1, 512, 2)


def test_a_stall_over_several_steps_sat_them_out() -> None:
    steps = StepRing(8)
    for i in range(4):
        steps.add(1.2 + 0.1 * i, 0.1, 100 + i, 3, prompts=1, prompt_tokens=90 + i)
    cause, count, _, _ = stalled(steps, DecodeRecord("r", 1, "", 0.0))
    assert (cause, count) == ("other_steps", 4)


def test_a_stall_without_steps_is_nobody_computing() -> None:
    steps = StepRing(8)
    steps.add(0.5, 0.1, 1, 1)
    steps.add(1.5, 0.01, 1, 1)
    assert stalled(steps, DecodeRecord("r", 1, "", 0.0))[0] == "between_steps"


def test_a_stall_behind_a_full_window_is_the_clients() -> None:
    record = DecodeRecord("r", 1, "", 0.0)
    record.pauses.extend((1.1, 1.45))
    steps = StepRing(8)
    steps.add(1.5, 0.04, 1, 1)
    assert stalled(steps, record)[0] == "client"


def test_a_stall_with_a_preemption_in_it_is_named_so() -> None:
    record, steps = DecodeRecord("r", 1, "", 0.0), StepRing(8)
    record.preempted.append(1.2)
    steps.add(1.5, 0.4, 9, 9)
    assert stalled(steps, record)[0] == "preempted"


def test_a_stall_whose_steps_are_gone_says_that_it_is_forgotten() -> None:
    steps = StepRing(1)
    steps.add(1.5, 0.4, 9, 9)
    steps.add(9.0, 0.4, 9, 9)
    assert stalled(steps, DecodeRecord("r", 1, "", 0.0))[0] == "forgotten"


def test_a_journal_travels_whole() -> None:
    record, steps = DecodeRecord("r", 7, "salt", 1.0), StepRing(8)
    prefill = ChunkLog(5.0)
    prefill.add(5.5, 0.25, 64, 3)
    prefill.cached_tokens = 8
    pull = PullRecord("p1", 1.25, scores=(("p1", 0.0), ("p2", 9.0)), num_bytes=99, alone=True)
    pull.note.final_s, pull.note.bytes_at_final = 1.5, 64
    pull.note.told = prefill.facts("clock", 6.0, StepCosts()).to_wire()
    record.pulls.append(pull)
    record.chunks.add(2.0, 0.5, 10, 1)
    steps.add(4.0, 0.5, 9, 9)
    record.times(0).extend((2.0, 2.01, 2.02, 2.03, 4.0))
    record.pauses.append(2.5)
    facts = told(record, steps)
    again = DecodeFacts.from_wire(msgpack.unpackb(msgpack.packb(facts.to_wire())))
    assert again == facts
    assert again.pulls[0].prefill == PrefillFacts(
        clock="clock",
        asked_s=5.0,
        sent_s=6.0,
        cached_tokens=8,
        chunks=(ChunkFacts(5.5, 0.25, 64, 3),),
        num_chunks=1,
        idle=again.pulls[0].prefill.idle,  # type: ignore[union-attr]
    )
    assert again.choices[0].stalls[0].cause == "client"
    json.dumps(facts.to_wire())


def test_chunks_of_a_very_long_prompt_are_counted_but_not_all_told() -> None:
    log = ChunkLog(0.0)
    for i in range(MAX_CHUNKS + 5):
        log.add(float(i), 0.1, 1, 0)
    assert (log.num_chunks, len(log.chunks())) == (MAX_CHUNKS + 5, MAX_CHUNKS)


def test_the_replica_remembers_the_latest_submits_and_lets_go_of_their_streams() -> None:
    journal = DecodeJournal(size=2)
    alive = {"decision": "local"}
    for stream_id in (1, 2, 3):
        record = DecodeRecord(f"r{stream_id}", stream_id, "", 0.0)
        journal.begin("g1", record, lambda: dict(alive))
        journal.settle("g1", record, 5.0, "finished")
    alive["decision"] = "changed"
    assert (len(journal), journal.tell("g1", 1, "d1")) == (2, None)
    facts = journal.tell("g1", 3, "d1")
    assert facts is not None
    assert (facts.request_id, facts.decision, facts.ended_s) == ("r3", "local", 5.0)
    assert journal.tell("g2", 3, "d1") is None  # another gateway's stream of that number
