"""The bootstrap, against what is known of it."""

import numpy as np
import pytest

from cluster.report.resample import MIN_REQUESTS, Resamples, block_length, nearest_rank


def autoregressive(n: int, memory: float, seed: int = 1):
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(n)
    out = np.zeros(n)
    for i in range(1, n):
        out[i] = memory * out[i - 1] + noise[i]
    return out


def resamples(n: int, length: float, num: int = 400) -> Resamples:
    return Resamples(n, length=length, num_resamples=num, seed=3, level=0.95)


@pytest.mark.parametrize(
    ("count", "percent", "rank"),
    [(1, 99.9, 0), (100, 50, 49), (100, 99, 98), (101, 99, 99), (1000, 99.9, 998), (40, 55, 21)],
)
def test_nearest_rank_takes_a_value_that_was_measured(count, percent, rank):
    assert nearest_rank(count, percent) == rank


def test_independent_values_need_no_blocks_and_dependent_ones_do():
    assert block_length(autoregressive(2000, 0.0)) < 4
    long = block_length(autoregressive(2000, 0.9))
    assert long > 4 * block_length(autoregressive(2000, 0.3))
    # For an AR(1) the optimum is known (Patton, Politis and White 2009): it grows with the cube
    # root of (2 a / (1 - a^2))^2 n.
    ideal = ((2 * 0.9 / (1 - 0.81)) ** 2) ** (1 / 3) * 2000 ** (1 / 3)
    assert ideal / 2 < long < ideal * 2


@pytest.mark.parametrize("values", [np.zeros(0), np.ones(1), np.ones(500), np.arange(5.0)])
def test_block_length_of_what_has_no_correlation_to_speak_of_is_one(values):
    assert block_length(values) == 1.0


def test_the_interval_of_a_mean_is_that_of_theory():
    n = 1000
    values = np.random.default_rng(5).standard_normal(n)
    interval = resamples(n, 1.0).mean(values, np.arange(n))
    assert interval is not None
    half = (interval.high - interval.low) / 2
    assert half == pytest.approx(1.96 / np.sqrt(n), rel=0.15)


def test_blocks_widen_the_interval_of_dependent_values():
    n = 2000
    values = autoregressive(n, 0.9)
    single = resamples(n, 1.0).mean(values, np.arange(n))
    blocks = resamples(n, block_length(values)).mean(values, np.arange(n))
    assert single is not None
    assert blocks is not None
    # The variance of the mean of an AR(1) is (1 + a) / (1 - a) times that of independent values.
    widening = (blocks.high - blocks.low) / (single.high - single.low)
    assert np.sqrt(19) / 1.6 < widening < np.sqrt(19) * 1.6


def test_quantiles_of_many_values_a_request_stay_with_their_request():
    # Every other request has 100 gaps of 2, the rest one gap of 1: the median is 2 for certain.
    owners = np.concatenate([np.full(100 if i % 2 else 1, i) for i in range(40)])
    values = np.where(owners % 2 == 1, 2.0, 1.0)
    (interval,) = resamples(40, 1.0).quantiles(values, owners, (50.0,), max_additions=10**9)
    assert interval is not None
    assert (interval.low, interval.high) == (2.0, 2.0)


def test_a_ratio_of_sums_is_resampled_by_request():
    above, below = np.array([1.0, 0.0] * 50), np.array([1.0, 1.0] * 50)
    interval = resamples(100, 1.0).ratio(above, below)
    assert interval is not None
    assert interval.low < 0.5 < interval.high
    assert interval.high - interval.low == pytest.approx(4 * 0.05, rel=0.25)


def test_too_few_requests_have_no_interval():
    few = MIN_REQUESTS - 1
    taken = resamples(few, 1.0)
    assert taken.mean(np.ones(few), np.arange(few)) is None
    assert taken.quantiles(np.ones(few), np.arange(few), (50.0,), max_additions=100) == [None]
    assert taken.ratio(np.ones(few), np.ones(few)) is None


def test_a_resample_without_any_value_is_left_out():
    # One request of twenty has a value: about a third of the resamples do not hold it.
    (interval,) = resamples(20, 1.0).quantiles(
        np.array([7.0]), np.array([3]), (99.0,), max_additions=10**6
    )
    assert interval is not None
    assert (interval.low, interval.high) == (7.0, 7.0)
