from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.replay.arrivals import Bursts, Profile, Ramp, constant, poisson
from engine.errors import ConfigError


def take(n, times):
    return list(itertools.islice(times, n))


def test_constant_and_poisson_arrivals_have_the_rate():
    assert take(4, constant(4.0)) == [0.0, 0.25, 0.5, 0.75]
    times = take(20_001, poisson(5.0, random.Random(1)))
    assert times[-1] == pytest.approx(4000, rel=0.03)
    assert times == take(20_001, poisson(5.0, random.Random(1)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(1.0, abs=0.03)


def test_a_profile_of_nothing_leaves_arrivals_alone():
    assert list(Profile().warp([0.0, 1.5, 7.0])) == [0.0, 1.5, 7.0]


def test_a_ramp_offers_what_its_integral_says():
    # From 0 to 2 times 10 a second over 10 s: t^2/10 of the base time has gone by at t.
    times = take(101, Profile(ramp=Ramp(0.0, 2.0, 10.0)).warp(constant(10.0)))
    assert times[100] == pytest.approx(10.0)
    assert times[25] == pytest.approx(5.0)
    after = take(141, Profile(ramp=Ramp(0.0, 2.0, 10.0)).warp(constant(10.0)))
    assert after[140] == pytest.approx(12.0)  # then twice the rate


def test_bursts_are_times_as_dense_for_so_long():
    times = take(2000, Profile(bursts=Bursts(every_s=5.0, for_s=1.0, times=3.0)).warp(constant(10)))

    def count(a, b):
        return sum(a - 1e-9 <= t < b - 1e-9 for t in times)

    assert [count(5 * k, 5 * k + 1) for k in (0, 1, 7)] == [30, 30, 30]
    assert [count(5 * k + 1, 5 * k + 5) for k in (0, 1, 7)] == [40, 40, 40]


@given(
    gaps=st.lists(st.floats(0, 50), min_size=1, max_size=30),
    ramp=st.none() | st.builds(Ramp, st.floats(0, 3), st.floats(0.01, 3), st.floats(0.01, 100)),
    bursts=st.none()
    | st.floats(0.1, 60).flatmap(
        lambda every: st.builds(
            Bursts,
            st.just(every),
            st.floats(0.05, 0.95).map(lambda x: x * every),
            st.floats(0.1, 9),
        )
    ),
)
def test_a_profile_keeps_order_and_loses_no_arrival(gaps, ramp, bursts):
    base = list(itertools.accumulate(gaps))
    times = list(Profile(ramp=ramp, bursts=bursts).warp(base))
    assert len(times) == len(base)
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(times))
    assert times[0] >= 0


@pytest.mark.parametrize(
    "make", [lambda: Ramp(1, 0, 5), lambda: Ramp(-1, 1, 5), lambda: Bursts(5, 5, 2)]
)
def test_what_cannot_be_a_profile_is_refused(make):
    with pytest.raises(ConfigError):
        make()
