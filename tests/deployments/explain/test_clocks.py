from __future__ import annotations

import pytest

from deployments.explain.clocks import SAME, Offset, clock_name, offset


def test_equal_clock_names_mean_no_offset_whatever_the_exchanges_say() -> None:
    assert offset([(0.0, 5.0, 6.0, 1.0)], "host", "host") == SAME


def test_clocks_without_a_name_are_never_taken_for_equal() -> None:
    assert offset([], "", "") is None


def test_an_exchange_bounds_the_offset_by_what_no_message_can_do() -> None:
    # Ours 0..10, the peer 100 ahead: received at 102, sent at 104, so 2 s there and 6 s back.
    bounds = offset([(0.0, 102.0, 104.0, 10.0)], "a", "b")
    assert bounds == Offset(94.0, 102.0)
    assert (bounds.seconds, bounds.uncertainty_s) == (98.0, 4.0)
    assert bounds.here(104.0) == 6.0


def test_more_exchanges_only_narrow_the_bounds() -> None:
    loose, tight = (0.0, 102.0, 104.0, 10.0), (20.0, 120.5, 120.5, 20.75)
    assert offset([loose, tight], "a", "b") == Offset(99.75, 100.5)


def test_contradicting_exchanges_give_the_span_between_them() -> None:
    stepped = [(0.0, 100.0, 100.0, 0.0), (1.0, 103.0, 103.0, 1.0)]
    assert offset(stepped, "a", "b") == Offset(100.0, 102.0)


def test_this_process_has_the_same_clock_all_the_time() -> None:
    assert clock_name() == clock_name()
    assert offset([], clock_name() or "x", clock_name() or "x") == SAME


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 7.25])
def test_the_true_offset_is_always_within_the_bounds(skew: float) -> None:
    exchange = (1.0, 1.3 + skew, 1.4 + skew, 1.5)
    bounds = offset([exchange], "a", "b")
    assert bounds is not None
    assert bounds.low_s <= skew <= bounds.high_s
