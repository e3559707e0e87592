from __future__ import annotations

import pytest

from cluster.bench.overhead import KEYS, _choose, _Figures, _Pairs, table
from cluster.bench.stack import ServedModel
from cluster.bench.worker import Load
from cluster.errors import ClusterError
from deployments.settings import ModelArgs, PoolSettings


def served(name: str, source: str) -> ServedModel:
    return ServedModel(
        name=name, app=name, args=ModelArgs(name=name, source=source), settings=PoolSettings()
    )


def result(arrivals: list[float], tokens: int, e2e: float) -> dict[str, object]:
    return {"arrivals_s": arrivals, "e2e_s": e2e, "completion_tokens": tokens}


def test_what_the_stack_adds_is_the_median_of_the_differences_of_pairs():
    # The difference of the medians would be 0.
    pairs = _Pairs([0.011, 0.030, 0.023], [0.010, 0.023, 0.030])
    assert pairs.added_ms == pytest.approx(1.0)
    assert pairs.to_json()["in_process"]["p50"] == 23.0


def test_figures_pool_requests_and_gaps_and_divide_all_tokens_by_all_time():
    figures = _Figures.of(
        [
            Load([result([0.010, 0.020, 0.040], 3, 0.040)], 0.5),
            Load([result([0.030, 0.040], 2, 0.050), result([], 1, 0.020)], 1.5),
        ]
    )
    # An answer without text has its end for a first token.
    assert (figures.ttft_ms.count, figures.ttft_ms.p50, figures.ttft_ms.max) == (3, 20.0, 30.0)
    assert (figures.itl_ms.count, figures.itl_ms.p50) == (3, pytest.approx(10.0))
    assert figures.num_tokens == 6
    assert figures.throughput_tok_s == 3.0


def test_the_model_to_compare_with_is_one_that_computes():
    models = [served("synthetic", "synthetic"), served("a", "tiny"), served("b", "fake")]
    assert _choose(models, None).name == "a"
    assert _choose(models, "b").name == "b"
    with pytest.raises(ClusterError, match="there are: synthetic, a, b"):
        _choose(models, "synthetic")


def test_the_keys_are_those_of_the_main_job():
    assert set(KEYS) == {
        "ttft_added_ms",
        "ttft_added_pd_ms",
        "transfer_exposed_ratio",
        "burst64_e2e_p50_s",
        "burst64_ttft_p50_ms",
        "burst64_ttft_p99_ms",
        "spread64_ttft_p50_ms",
        "spread64_ttft_p99_ms",
        "gateway_us_per_token",
        "gateway_us_per_request",
        "decode_us_per_token",
    }


def test_the_table_says_what_is_not_known():
    lines = table({**dict.fromkeys(KEYS), "ttft_added_ms": 3.2})
    assert lines[0].split() == ["ttft_added_ms", "3.2"]
    assert lines[1].split() == ["ttft_added_pd_ms", "unknown"]
