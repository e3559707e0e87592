from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.summary import Summary, compare, percentile, significant


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1.0), (25, 1.0), (26, 2.0), (50, 2.0), (99, 4.0), (100, 4.0)]
)
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(percent, expected):
    assert percentile([3.0, 1.0, 4.0, 2.0], percent) == expected


def test_the_99th_percentile_of_192_values_is_the_second_worst():
    assert percentile([float(i) for i in range(192)], 99) == 190.0


def test_a_percentage_that_floats_cannot_hold_takes_the_exact_rank():
    # 0.55 * 100 is 55.00000000000001.
    assert percentile([float(i) for i in range(1, 101)], 55) == 55.0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0.1, 100))
def test_a_percentile_was_measured_and_covers_its_share(values, percent):
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) >= percent / 100 * len(values) - 1e-6


@pytest.mark.parametrize("percent", [0, -1, 100.5])
def test_a_percentage_out_of_range_is_refused(percent):
    with pytest.raises(ValueError, match="above 0 and at most 100"):
        percentile([1.0], percent)


def test_nothing_has_no_percentile():
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_a_summary_scales_and_takes_the_median_between_two():
    summary = Summary.of([0.001, 0.004, 0.002, 0.003], 1000)
    assert (summary.count, summary.p50, summary.p90, summary.max) == (4, 2.5, 4.0, 4.0)
    assert summary.mean == pytest.approx(2.5)


def test_four_digits_are_told():
    assert significant(12.34567) == 12.35
    assert significant(0.000123456) == 0.0001235
    assert significant(123456.0) == 123500.0
    assert significant(123456) == 123456
    assert significant(0.0) == 0.0
    assert math.isinf(significant(math.inf))


def test_a_comparison_tells_difference_and_ratio():
    assert compare(12.0, 10.0) == {
        "stack": 12.0,
        "in_process": 10.0,
        "difference": 2.0,
        "ratio": 1.2,
    }
