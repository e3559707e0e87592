from __future__ import annotations

import pytest

from deployments.explain.costs import Estimate, StepCosts


def test_nothing_is_known_before_the_first_step() -> None:
    costs = StepCosts()
    assert costs.decode_step() == Estimate(None, "none", 0)
    assert costs.prefill([64]) == Estimate(None, "none", 0)
    assert costs.prefill([]) == Estimate(0.0, "alone", 0)


def test_a_decode_step_alone_costs_the_median_of_those_alone() -> None:
    costs = StepCosts()
    for seconds in (0.010, 0.011, 0.500):  # one of them was disturbed
        costs.observe(seconds, tokens=1, rows=1, prompts=0, prompt_tokens=0)
    costs.observe(0.2, tokens=40, rows=40, prompts=0, prompt_tokens=0)
    assert costs.decode_step() == Estimate(0.011, "alone", 3)


def test_chunks_alone_lie_on_a_line_that_prices_others() -> None:
    costs = StepCosts()
    for tokens in (32, 64, 256):
        costs.observe(0.01 + 0.001 * tokens, tokens, 0, prompts=1, prompt_tokens=tokens)
    told = costs.prefill([128, 128])
    assert told.seconds == pytest.approx(2 * (0.01 + 0.128))
    assert (told.basis, told.samples) == ("alone", 3)


def test_chunks_of_one_size_price_others_in_proportion() -> None:
    costs = StepCosts()
    costs.observe(0.1, 100, 0, prompts=1, prompt_tokens=100)
    assert costs.prefill([50]).seconds == pytest.approx(0.05)


def test_without_a_step_alone_all_steps_say_what_they_can() -> None:
    costs = StepCosts()
    for rows in (10, 20):
        costs.observe(0.01 + 0.001 * rows, rows, rows, prompts=0, prompt_tokens=0)
    told = costs.decode_step()
    assert (told.basis, told.samples) == ("all steps", 2)
    assert told.seconds == pytest.approx(0.011)


def test_a_falling_line_is_not_believed() -> None:
    costs = StepCosts()
    costs.observe(0.2, 10, 0, prompts=1, prompt_tokens=10)
    costs.observe(0.1, 100, 0, prompts=1, prompt_tokens=100)
    assert costs.prefill([1000]).seconds == pytest.approx(0.15)
