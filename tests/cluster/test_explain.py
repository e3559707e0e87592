"""What the command shows of an explanation, and of a gateway that gives none."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from cluster.errors import ClusterError, NotRunning
from cluster.explain import ExplainClient, drawn, explain, listed
from deployments.explain.clocks import SAME
from deployments.explain.costs import Estimate
from deployments.explain.decode import ChoiceFacts, DecodeFacts, PullRecord, Stall
from deployments.explain.prefill import ChunkFacts, PrefillFacts
from deployments.explain.queueing import QueueFacts
from deployments.explain.request import ExternalSpan, Leg, Note, RequestRecord
from deployments.explain.waterfall import assemble
from engine.errors import RequestError
from engine.transfer.transport import TransferNote


def explanation() -> dict[str, Any]:
    """A request with something of everything: a second queued, then prefill, transfer, a stall."""
    leg = Leg(
        *(0, (0,), 0.1, 1.1, 1.2, 2.0, 3.0, "d1", 4),
        queue=QueueFacts(
            ahead=2,
            waiting=(("default", 3),),
            granted_before=(("default", 2),),
            rule="most free slots",
            scores=(("d1", 1.0), ("d2", 0.0)),
        ),
        end="finished",
    )
    record = RequestRecord(
        *("req_1", "chat", 0.0, 1_700_000_000.0),
        model="m",
        read_s=0.01,
        tokenised_s=0.1,
        first_token_s=2.0,
        ended_s=3.2,
        outcome="finished",
        status=200,
        prompt_tokens=40,
        completion_tokens=3,
        cached_tokens=8,
        write_s=0.1,
        worst_write_s=0.1,
        num_writes=1,
        spans=(ExternalSpan(name="search", kind="tool", before_s=0.5, duration_s=0.5),),
        legs=[leg],
        notes=[Note(0.2, "degraded", {})],
    )
    told = PrefillFacts(
        clock="c",
        asked_s=1.25,
        sent_s=1.75,
        cached_tokens=8,
        chunks=(ChunkFacts(1.75, 0.25, 32, 5),),
        num_chunks=1,
        idle=Estimate(0.1, "alone", 3),
    )
    note = TransferNote(1.25, 1.6, 1.75, 100, told.to_wire())
    stall = Stall(
        at_s=2.0,
        gap_s=0.75,
        cause="slow_step",
        steps=1,
        step_s=0.7,
        tokens=65,
        rows=1,
        prompts=1,
        prompt_tokens=64,
    )
    facts = DecodeFacts(
        replica="d1",
        clock="c",
        request_id="r",
        stream_id=4,
        salt="",
        begun_s=1.22,
        reserved_s=1.23,
        first_sent_s=1.9,
        ended_s=2.9,
        outcome="finished",
        decision="disaggregated",
        pulls=(
            PullRecord("p0", 1.22, ended_s=1.23, error="connect"),
            PullRecord("p1", 1.23, (("p1", 0.0),), note, 1.9, 200),
        ),
        choices=(
            ChoiceFacts(
                choice=0,
                num_tokens=3,
                first_s=1.9,
                last_s=2.8,
                mean_gap_s=0.5,
                worst_gap_s=0.75,
                median_gap_s=0.5,
                step_s=0.9,
                mean_rows=1.5,
                num_stalls=1,
                stalls=(stall,),
            ),
        ),
        idle_step=Estimate(0.1, "alone", 9),
    )
    return json.loads(json.dumps(assemble(record, {("d1", 4): (facts, SAME)}, 9.0).to_json()))


def test_an_explanation_is_drawn_to_scale_with_every_section() -> None:
    lines = list(drawn(explanation(), width=37))
    assert lines[0] == "req_1  m  default  finished 200"
    assert lines[1] == (
        "3.20 s in all, 500.0 ms outside before it, first token after 2.00 s, 40 tokens in, 3 out"
    )
    assert lines[2] == (
        "most of it: queue, 1.00 s (27%); on an idle cluster 1.45 s, queue cost 1.00 s more than "
        "there"
    )
    bars = [line for line in lines if "|" in line]
    assert bars[0] == f"  search            500.0 ms |{'█' * 5}{' ' * 32}| client"
    assert [line.split()[0] for line in bars] == [
        *("search", "read", "tokenize", "queue", "route", "link", "failed_pull", "link"),
        *("prefill_queue", "prefill", "kv_transfer", "link", "decode", "deliver", "stream"),
    ]
    text = "\n".join(lines)
    for words in (
        "accounted for 100.00%, unaccounted 0 µs, clocks within 0 µs",
        "waited 1.00 s, 2 ahead of it among 3 default; went first: 2 default",
        "decode d1: most free slots (d1 1, d2 0)",
        "0 tokens cached at decode, 8 at prefill, 32 computed",
        "1 steps on p1 (disaggregated), 1 shared with others",
        "200 bytes from p1: 150.0 ms hidden, 150.0 ms exposed",
        "from p0: connect after 10.0 ms",
        "3 tokens, mean gap 500.0 ms, worst 750.0 ms, 1.5 requests a step",
        "stalled 750.0 ms: slow_step, 1 steps, the longest with 1 rows and 64 tokens of 1 prompts",
        "1 writes took 100.0 ms, the worst 100.0 ms",
        "degraded at +200.0 ms",
    ):
        assert words in text


def client(answer: httpx.Response) -> ExplainClient:
    return ExplainClient("http://gateway/v1", transport=httpx.MockTransport(lambda request: answer))


def test_a_request_that_nobody_remembers_is_the_gateways_own_words() -> None:
    body = {"error": {"message": "none of 2 gateways remembers it", "code": "request_not_found"}}
    with pytest.raises(RequestError, match="none of 2 gateways remembers it"):
        client(httpx.Response(404, json=body)).explain("x")


def test_somebody_elses_server_is_not_believed() -> None:
    with pytest.raises(ClusterError, match="not an answer of a Tailrace gateway"):
        client(httpx.Response(200, text="hello")).requests()


def test_nobody_there_says_how_to_start_one() -> None:
    with pytest.raises(NotRunning, match="tailrace up"):
        ExplainClient("http://127.0.0.1:9").explain("x")


def test_ids_with_any_character_are_asked_for_as_they_are() -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(200, json={})

    ExplainClient("http://gateway", transport=httpx.MockTransport(answer)).explain("a/b?c=ü")
    assert asked == [b"/tailrace/explain/a%2Fb%3Fc%3D%C3%BC"]


def test_a_list_is_a_table_and_an_empty_one_its_head() -> None:
    row = {
        "request_id": "req_1",
        "model": "m",
        "tier": "default",
        "duration_s": 3.2,
        "ttft_s": 2.0,
        "prompt_tokens": 40,
        "completion_tokens": 3,
        "status": 200,
        "outcome": "finished",
        "dominant_phase": "decode",
    }
    table = list(listed([row, {**row, "request_id": "r", "ttft_s": None, "model": None}]))
    assert table[1].split() == ["req_1", "m", "default", "3.200", "2.000", "40+3", "200", "decode"]
    assert table[2].split() == ["r", "default", "3.200", "40+3", "200", "decode"]
    assert len(list(listed([]))) == 1


def test_the_command_says_what_it_is_for() -> None:
    told = CliRunner().invoke(explain, ["--help"])
    assert told.exit_code == 0
    assert "Say where the time of REQUEST_ID went" in told.output
