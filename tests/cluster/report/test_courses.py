import numpy as np
from outcomes import outcome

from cluster.report import courses


def test_in_flight_counts_who_is_between_beginning_and_end():
    times, levels = courses.in_flight(np.array([0.0, 1.0, 2.0]), np.array([2.0, 3.0, 4.0]))
    assert times.tolist() == [0, 1, 2, 2, 3, 4]
    # At 2 one leaves before the next comes.
    assert levels.tolist() == [1, 2, 1, 2, 1, 0]


def test_a_rolling_percentile_follows_a_step_in_the_values():
    times = np.arange(240.0)
    values = np.where(times < 120, 1.0, 5.0)
    moments, (p50, p99) = courses.rolling(times, values, (50.0, 99.0))
    assert p50[moments < 105].max() == 1.0
    assert p50[moments > 135].min() == 5.0
    assert p99[np.argmin(np.abs(moments - 115))] == 5.0


def test_a_rolling_window_widens_until_it_holds_five_values():
    times = np.array([0.0, 1.0, 2.0, 3.0, 1000.0])
    moments, (p50,) = courses.rolling(times, np.array([1.0, 2.0, 3.0, 4.0, 5.0]), (50.0,))
    assert set(p50.tolist()) == {3.0}
    assert len(moments) == 60


def test_too_few_values_roll_to_nothing():
    moments, rows = courses.rolling(np.arange(4.0), np.arange(4.0), (50.0, 99.0))
    assert (len(moments), rows.shape) == (0, (2, 0))


def test_thinning_a_step_curve_keeps_its_peaks():
    times = np.arange(10_000.0)
    levels = np.zeros(10_000)
    levels[7777] = 42.0
    _, kept = courses.thinned(times, levels, most=100)
    assert len(kept) <= 100
    assert kept.max() == 42.0


def test_a_cumulative_curve_never_loses_its_tail():
    xs, ys = courses.cumulative(np.arange(100_000.0), most=100)
    assert len(xs) <= 200
    assert xs[-100:].tolist() == list(range(99_900, 100_000))
    assert ys[-1] == 1.0


def test_the_queue_is_entered_after_the_phases_before_it():
    one = outcome(0, attempt_s=3.0, phases={"tokenize": 0.5, "queue": 2.0, "prefill": 1.0})
    begins, ends = courses.queue_spans([one, outcome(1)])
    assert (begins.tolist(), ends.tolist()) == ([3.5], [5.5])


def test_counts_of_an_empty_span_do_not_fail():
    assert courses.counts_over_time(np.array([0.0]), (0.0, 0.0)).sum() == 1
