from __future__ import annotations

import pytest

from cluster.bench.agreement import (
    ITL,
    OURS,
    TTFT,
    Difference,
    Run,
    differences,
    from_histograms,
    from_outcomes,
    from_request_log,
    scraped,
)
from cluster.bench.load_tools import Latency, Measured
from cluster.errors import ClusterError
from cluster.replay.outcome import Outcome


def said(ttft: float, p99: float = 60.0, rate: float | None = 10.0) -> Measured:
    return Measured(
        num_requests=2,
        ttft_ms=Latency(mean=ttft, p99=p99),
        itl_ms=Latency(mean=10.0),
        requests_per_s=rate,
    )


@pytest.mark.parametrize(
    ("figure", "first", "second", "agrees"),
    [
        ("ttft_ms.mean", 50.0, 55.0, True),
        ("ttft_ms.mean", 50.0, 55.1, False),
        ("ttft_ms.mean", 200.0, 210.0, True),
        ("ttft_ms.mean", 200.0, 210.6, False),
        # 5 ms are no slack for a rate.
        ("requests_per_s", 10.0, 10.5, True),
        ("requests_per_s", 10.0, 10.6, False),
    ],
)
def test_within_the_larger_of_five_percent_and_five_milliseconds_is_agreement(
    figure: str, first: float, second: float, agrees: bool
):
    assert Difference(figure=figure, first="a", second="b", values=(first, second)).agrees is agrees


def test_clients_are_compared_with_the_server_in_their_window_and_with_ours_across_runs():
    server = Measured(num_requests=2, ttft_ms=Latency(mean=49.0), itl_ms=Latency(mean=10.0))
    runs = [
        Run(client=OURS, measured=said(50.0), histograms=server),
        Run(client="aiperf", measured=said(52.0, p99=90.0), request_log=said(51.0, p99=88.0)),
    ]
    found = {(each.figure, each.first, each.second): each for each in differences(runs)}
    assert found["ttft_ms.mean", OURS, "histograms (replay)"].values == (50.0, 49.0)
    assert found["ttft_ms.p99", "aiperf", "request log (aiperf)"].counts
    across = found["ttft_ms.p99", OURS, "aiperf"]
    assert (across.agrees, across.counts) == (False, False)
    assert found["requests_per_s", OURS, "aiperf"].counts
    # What one of two does not tell is not compared.
    assert ("requests_per_s", OURS, "histograms (replay)") not in found


def test_a_scrape_is_summed_over_tiers_and_streams():
    text = "\n".join(
        [
            "# TYPE tailrace_request_ttft_seconds histogram",
            f'{TTFT}_bucket{{model="m",tier="a",le="+Inf"}} 2',
            f'{TTFT}_sum{{model="m",tier="a"}} 0.5',
            f'{TTFT}_count{{model="m",tier="a"}} 2',
            f'{TTFT}_sum{{model="m",tier="b"}} 0.25',
            f'{TTFT}_count{{model="m",tier="b"}} 1',
            f'{ITL}_sum{{model="m",tier="a"}} 1e-2',
            f'{ITL}_count{{model="m",tier="a"}} 4',
            "",
        ]
    )
    assert scraped(text) == {TTFT: (0.75, 3.0), ITL: (0.01, 4.0)}


def test_histograms_tell_the_means_of_a_window_that_holds_exactly_its_requests():
    before = {TTFT: (1.0, 10.0), ITL: (1.0, 100.0)}
    after = {TTFT: (1.1, 12.0), ITL: (1.06, 106.0)}
    told = from_histograms(before, after, 2)
    assert told is not None
    assert (told.ttft_ms.mean, told.itl_ms.mean) == (pytest.approx(50.0), pytest.approx(10.0))
    assert from_histograms(before, after, 3) is None
    assert from_histograms(after, before, 2) is None
    assert from_histograms({}, {}, 2) is None


def test_the_request_log_tells_what_aiperf_means_by_inter_token_latency():
    line = {"outcome": "finished", "ttft_s": 0.05, "duration_s": 0.08, "completion_tokens": 4}
    lines = [line | {"at": 100.0}, line | {"at": 100.42, "ttft_s": 0.02}]
    told = from_request_log(lines, 2)
    assert told is not None
    assert (told.ttft_ms.p50, told.ttft_ms.p99) == (20.0, 50.0)
    assert (told.itl_ms.p50, told.itl_ms.p99) == (pytest.approx(10.0), pytest.approx(20.0))
    assert (told.requests_per_s, told.tokens_per_s) == (pytest.approx(4.0), pytest.approx(16.0))
    assert from_request_log([*lines, lines[0]], 2) is None


def test_our_own_client_tells_of_whole_answers_only():
    def outcome(index: int, result: str) -> Outcome:
        return Outcome(
            index=index,
            source="s",
            scheduled_s=float(index),
            sent_s=float(index),
            attempt_s=float(index),
            first_token_s=index + 0.05,
            end_s=index + 0.09,
            chunk_times=(index + 0.05, index + 0.06, index + 0.08),
            planned_input_tokens=4,
            planned_output_tokens=3,
            output_tokens=4,
            result=result,  # type: ignore[arg-type]
        )

    told = from_outcomes([outcome(0, "ok"), outcome(1, "error")])
    assert (told.num_requests, told.ttft_ms.mean) == (1, pytest.approx(50.0))
    assert told.itl_ms.mean == pytest.approx(10.0)
    with pytest.raises(ClusterError, match="no request was answered"):
        from_outcomes([outcome(1, "error")])
