"""Real processes behind real sockets, offered the same in turn."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stub_openai
from outcomes import failed, outcome

from cluster.compare.contest import (
    Contest,
    Load,
    Plan,
    Record,
    at_rate,
    closed_loop_rate,
    rounds_of,
)
from cluster.compare.files import write_comparison
from cluster.compare.findings import doubts, find, sentences, to_json
from cluster.compare.page import page
from cluster.compare.peers.process import PORT, ProcessSide
from cluster.compare.sides import UrlSide
from cluster.errors import ClusterError
from cluster.replay.arrivals import Bursts, Profile
from cluster.replay.formats import read_trace
from cluster.replay.mix import Part
from cluster.replay.replay import Spec
from cluster.replay.workload import Factors
from cluster.report.figures import Bootstrap
from cluster.report.targets import Targets

TRACES = Path(__file__).parents[2] / "traces"
CONVERSATION = TRACES / "azure2023_conv.jsonl"
SLO = {"*": Targets(ttft_s=0.5)}


def stub(name: str, ttft_s: float) -> ProcessSide:
    command = [sys.executable, stub_openai.__file__, "--port", PORT]
    return ProcessSide(name, [*command, "--ttft", str(ttft_s), "--itl", "0.0005"])


def plan(*loads: Load) -> Plan:
    trace = read_trace(CONVERSATION)
    return Plan(
        spec=Spec(
            traces=(trace,),
            mix=(Part(source=trace.name),),
            factors=Factors(length=0.05, max_duration_s=1.5, max_output_tokens=8),
        ),
        loads=loads,
        capacity_users=4,
        capacity_requests=16,
    )


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A contest of a quick and a slow server under two loads, and its directory."""
    directory = tmp_path_factory.mktemp("contest")
    said = []
    sides = [stub("quick", 0.01), stub("slow", 0.06)]
    contest = Contest(
        sides,
        plan(Load(multiple=0.1), Load(rate=30.0)),
        directory,
        said.append,
        lambda: None,
    )
    return contest.hold(), directory, said


def test_sides_take_turns_forwards_and_backwards(held):
    record, _, said = held
    starts = [line for line in said if line.startswith("round")]
    assert starts == [
        "round 1 of 2: quick",
        "round 1 of 2: slow",
        "round 2 of 2: slow",
        "round 2 of 2: quick",
    ]
    assert [(t.side, t.load, t.round) for t in record.taken] == [
        (side, load, number)
        for number, order in enumerate((("quick", "slow"), ("slow", "quick")))
        for side in order
        for load in ("0.1 × capacity", "30 requests a second")
    ]


def test_both_sides_of_a_round_are_offered_the_same_and_no_text_twice(held):
    record, directory, _ = held
    runs = rounds_of(record, directory)
    seeds = {}
    for load, by_side in runs.items():
        for number in (0, 1):
            pair = [by_side[side][number] for side in ("quick", "slow")]
            offered = [
                [(o.index, o.planned_input_tokens, round(o.scheduled_s, 3)) for o in outcomes]
                for _, _, outcomes in pair
            ]
            assert offered[0] == offered[1]
            assert len(offered[0]) >= 2
            (seed,) = {run.seed for _, run, _ in pair}
            seeds[load, number] = seed
    assert len(set(seeds.values())) == 4


def test_a_multiple_of_capacity_is_offered_at_that_rate(held):
    record, directory, _ = held
    assert set(record.capacity) == {"quick", "slow"}
    assert record.capacity["quick"] > record.capacity["slow"]
    (_, run, _) = rounds_of(record, directory)["0.1 × capacity"]["slow"][0]
    assert run.rate == pytest.approx(0.1 * record.capacity["quick"], rel=0.05)


def test_the_report_says_where_the_slow_side_loses(held):
    record, directory, _ = held
    findings = find(record, directory, SLO, bootstrap=Bootstrap(num_resamples=100))
    value = to_json(findings)
    html = write_comparison(directory, findings, "quick against slow", value)
    lost = [line for line in sentences(findings) if "slow loses to quick" in line]
    assert any("at 30 requests a second: TTFT p50" in line for line in lost)
    assert not any(re.match("quick loses.*TTFT", line) for line in sentences(findings))
    text = html.read_text()
    for said in (
        "slow loses to quick at 30 requests a second:",
        "slow / quick",
        "TTFT, the tail",
        "stub_openai.py",
    ):
        assert page_text(said) in text, said
    assert not re.search(r"(src|href)=", text)
    ratio = next(
        figure
        for match in value["matches"]
        if match["load"] == "30 requests a second"
        for figure in match["figures"]
        if figure["figure"] == "ttft_scheduled_s_p50"
    )
    assert ratio["change"] > 2
    json.dumps(value, allow_nan=False)
    assert len((directory / "figures.csv").read_text().splitlines()) > 20
    assert any("2 rounds" in line for line in doubts(findings))


def page_text(text: str) -> str:
    import html

    return html.escape(text, quote=True)


def test_a_report_is_made_again_from_what_was_kept(held):
    record, directory, _ = held
    again = Record.load(directory)
    assert again.taken == record.taken
    few = Bootstrap(num_resamples=20)
    now, before = (
        page(find(each, directory, SLO, bootstrap=few), "title") for each in (again, record)
    )
    assert now == before


def test_pairs_that_are_not_complete_are_left_out(held):
    _, directory, _ = held
    cut = Record.load(directory)
    cut.interrupted = True
    cut.taken = [each for each in cut.taken if (each.side, each.round) != ("quick", 1)]
    findings = find(cut, directory, SLO, bootstrap=Bootstrap(num_resamples=20))
    assert {match.num_rounds for match in findings.matches} == {1}
    assert any("interrupted" in line for line in doubts(findings))
    cut.taken = [each for each in cut.taken if each.side == "slow"]
    with pytest.raises(ClusterError, match="no two runs under the same load are complete"):
        find(cut, directory, SLO)


def test_a_side_that_does_not_start_says_its_own_words(tmp_path):
    broken = ProcessSide("broken", [sys.executable, "-c", "raise SystemExit('no model here')"])
    contest = Contest(
        [broken, UrlSide("other", "http://127.0.0.1:9")],
        plan(Load(rate=1.0)),
        tmp_path,
        lambda line: None,
        lambda: None,
    )
    with pytest.raises(ClusterError, match="no model here"):
        contest.hold()


def test_a_process_is_gone_when_its_side_is_left():
    side = stub("one", 0.01)
    with side.serving(lambda line: None) as served:
        assert served.ready_s is not None
        running = served.processes()
        assert running
    assert not any(each.is_running() for each in running)


def test_two_sides_of_one_name_are_refused(tmp_path):
    sides = [UrlSide("a", "http://127.0.0.1:1"), UrlSide("a", "http://127.0.0.1:2")]
    with pytest.raises(ClusterError, match="each with its own name"):
        Contest(sides, plan(Load(rate=1.0)), tmp_path, lambda line: None, lambda: None)


# Rates


def test_a_rate_is_that_of_the_requests_that_are_offered():
    trace = read_trace(CONVERSATION)
    made = at_rate(Factors(max_duration_s=10.0), [trace], 4.0)
    assert made.max_requests == 40
    times = [each.at_s for each in trace.requests]
    assert made.time * (times[39] - times[0]) == pytest.approx(39 / 4.0)
    assert (made.rate, made.max_duration_s) == (None, None)


def test_a_rate_is_that_of_the_whole_where_there_is_no_window():
    trace = read_trace(CONVERSATION)
    base = Factors(max_duration_s=10.0)
    whole = replace(base, rate=4.0)
    assert at_rate(base, [trace, trace], 4.0) == whole
    bursts = replace(base, profile=Profile(bursts=Bursts(10, 1, 2)))
    assert at_rate(bursts, [trace], 4.0) == replace(bursts, rate=4.0)
    assert at_rate(base, [trace], 1e6) == replace(base, rate=1e6)


def test_a_closed_loop_rate_leaves_out_how_it_began_and_ended():
    # Two users, each answered after exactly 0.5 s: four a second, whatever the ends look like.
    outcomes = [
        outcome(i, scheduled_s=0.5 * (i // 2), end_s=0.5 * (i // 2) + 0.5) for i in range(20)
    ]
    assert closed_loop_rate(outcomes, 2) == pytest.approx(4.0)


def test_a_closed_loop_that_mostly_fails_gives_no_capacity():
    outcomes = [failed(i, "error", message="out of memory") for i in range(20)]
    with pytest.raises(ClusterError, match=r"only 0 of 20 .*\(out of memory\)"):
        closed_loop_rate(outcomes, 2)
