import random

import pytest

from engine.scheduling.cost import StepCost, StepWork, prompt_work, row_work


def true_seconds(work: StepWork) -> float:
    return 2e-3 + 3e-4 * work.rows + 5e-5 * work.prompt_tokens + 2e-7 * work.reads


def random_work(rng: random.Random) -> StepWork:
    work = prompt_work(rng.randrange(2000), rng.choice([0, 0, 16, 64, 256]))
    for _ in range(rng.randrange(1, 32)):
        work += row_work(rng.randrange(1, 2000))
    return work


def test_work_adds_up():
    assert row_work(10) + prompt_work(4, 3) == StepWork(rows=1, prompt_tokens=3, reads=10 + 12 + 6)
    assert prompt_work(0, 4).reads == 1 + 2 + 3 + 4


def test_nothing_is_known_before_a_few_steps_ran():
    cost = StepCost()
    for _ in range(7):
        cost.observe(row_work(5), 0.01)
        assert not cost.known
    cost.observe(row_work(5), 0.01)
    assert cost.known


def test_it_learns_the_cost_of_mixed_steps():
    rng, cost = random.Random(1), StepCost()
    for _ in range(300):
        work = random_work(rng)
        cost.observe(work, true_seconds(work) * rng.uniform(0.95, 1.05))
    for _ in range(50):
        work = random_work(rng)
        assert cost.seconds(work) == pytest.approx(true_seconds(work), rel=0.1)
    assert cost.prompt_tokens(0.01, 0) == pytest.approx(0.01 / 5e-5, rel=0.15)


def test_it_follows_a_machine_that_became_slower():
    rng, cost = random.Random(2), StepCost()
    for factor in (1.0, 2.5):
        for _ in range(400):
            work = random_work(rng)
            cost.observe(work, factor * true_seconds(work))
        work = random_work(rng)
        assert cost.seconds(work) == pytest.approx(factor * true_seconds(work), rel=0.1)


def test_one_disturbed_step_moves_the_estimate_little():
    rng, cost = random.Random(3), StepCost()
    for _ in range(200):
        work = random_work(rng)
        cost.observe(work, true_seconds(work))
    work = StepWork(rows=16, reads=8000)
    cost.observe(work, 10.0)
    assert cost.seconds(work) < 1.5 * true_seconds(work)


def test_a_long_run_of_equal_steps_keeps_it_stable():
    cost, work = StepCost(), StepWork(rows=8, reads=800)
    for _ in range(20_000):
        cost.observe(work, 0.004)
    assert cost.seconds(work) == pytest.approx(0.004, rel=1e-3)
    mixed = StepWork(rows=8, prompt_tokens=256, reads=40_000)
    for _ in range(20):
        cost.observe(mixed, 0.020)
        cost.observe(work, 0.004)
    assert cost.seconds(mixed) == pytest.approx(0.020, rel=0.05)
    assert cost.seconds(work) == pytest.approx(0.004, rel=0.05)


def test_time_does_not_run_backwards():
    with pytest.raises(ValueError, match="seconds=-1"):
        StepCost().observe(StepWork(), -1.0)
