import math
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.gateway.limits.window import SlidingWindow, Standing


def test_what_was_taken_counts_for_a_window_and_no_longer():
    window = SlidingWindow()
    window.take(70, 0.2)
    window.take(20, 30.0)
    assert window.taken(30.0) == 90
    assert window.wait_s(100, 10, 30.0) == 0
    # The slot of the first taking, 0 to 1 s, is a whole minute old at 61 s.
    assert window.wait_s(100, 11, 30.0) == pytest.approx(31.0)
    assert window.taken(60.9) == 90
    assert window.taken(61.0) == 20
    assert window.taken(91.0) == 0
    assert window.idle


def test_more_than_the_limit_never_fits():
    assert SlidingWindow().wait_s(10, 11, 0.0) == math.inf
    assert SlidingWindow().wait_s(10, 10, 0.0) == 0


def test_a_wait_counts_as_many_slots_as_it_needs():
    window = SlidingWindow()
    for second in range(5):
        window.take(20, float(second))
    assert window.wait_s(100, 10, 5.0) == pytest.approx(56.0)
    assert window.wait_s(100, 50, 5.0) == pytest.approx(58.0)


def test_what_is_given_back_is_free_at_once():
    window = SlidingWindow()
    slot = window.take(100, 3.0)
    window.give_back(slot, 40)
    assert window.wait_s(100, 40, 4.0) == 0
    assert window.wait_s(100, 41, 4.0) > 0
    window.give_back(slot, 1000)  # never more than was taken
    assert window.taken(4.0) == 0
    assert window.standing(100, 4.0) == Standing(100, 100, 0.0)


def test_giving_back_what_ran_out_changes_nothing():
    window = SlidingWindow()
    slot = window.take(100, 3.0)
    window.take(5, 100.0)
    window.give_back(slot, 100)
    assert window.taken(100.0) == 5


def test_standing_tells_what_is_left_and_when_all_is_back():
    window = SlidingWindow()
    window.take(30, 10.0)
    assert window.standing(100, 20.5) == Standing(100, 70, pytest.approx(50.5))


takings = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=60
)


@given(takings)
def test_no_minute_ever_holds_more_than_the_limit(steps):
    """Whatever is asked when, and however much of it is given back later."""
    window, now, limit = SlidingWindow(), 0.0, 100
    granted: list[tuple[float, int]] = []
    for pause_s, cost, unused in steps:
        now += pause_s
        wait_s = window.wait_s(limit, cost, now)
        if wait_s == 0:
            slot = window.take(cost, now)
            returned = int(unused * cost)
            window.give_back(slot, returned)
            granted.append((now, cost - returned))
        else:
            later = deepcopy(window)
            assert later.wait_s(limit, cost, now + wait_s) == 0, "the hint was too short"
    for end_s, _ in granted:
        assert sum(cost for at_s, cost in granted if end_s - 60 <= at_s <= end_s) <= limit
