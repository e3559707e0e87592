from __future__ import annotations

from deployments.explain.steps import Step, StepRing


def ring(*ends: float, size: int = 4) -> StepRing:
    made = StepRing(size)
    for i, end_s in enumerate(ends):
        made.add(end_s, 0.5, 10 + i, i, prompts=1, prompt_tokens=10, preempted=2)
    return made


def test_a_step_is_found_by_its_end_and_is_what_was_put_in() -> None:
    (found,) = ring(1.0, 2.0).between(1.0, 2.0)
    assert found == Step(
        end_s=2.0, duration_s=0.5, tokens=11, rows=1, prompts=1, prompt_tokens=10, preempted=2
    )


def test_what_steps_took_is_told_of_exactly_those_that_were_asked_for() -> None:
    made = ring(1.0, 2.0, 3.0, 4.0)
    assert made.spent([2.0, 4.0]) == (1.0, 2.0)
    assert made.spent([1.0, 2.0, 3.0, 4.0]) == (2.0, 1.5)
    for unknown in ([], [2.0, 3.5], [0.5], [4.0, 5.0]):
        assert made.spent(unknown) is None


def test_what_steps_took_is_told_across_the_end_of_the_ring() -> None:
    made = ring(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert made.spent([3.0, 4.0, 5.0, 6.0]) == (2.0, 3.5)
    assert made.spent([2.0, 3.0]) is None


def test_only_the_last_steps_are_kept() -> None:
    made = ring(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert (len(made), made.oldest_s) == (4, 3.0)
    assert [step.end_s for step in made.between(0.0, 9.0)] == [3.0, 4.0, 5.0, 6.0]


def test_between_leaves_out_the_first_border_and_takes_in_the_second() -> None:
    made = ring(1.0, 2.0, 3.0, 4.0)
    assert [step.end_s for step in made.between(1.0, 3.0)] == [2.0, 3.0]
    assert made.between(3.5, 3.6) == []


def test_an_empty_ring_knows_nothing() -> None:
    made = StepRing(4)
    assert (len(made), made.oldest_s, made.spent([1.0]), made.between(0.0, 9.0)) == (
        0,
        None,
        None,
        [],
    )


def test_counts_beyond_their_width_are_kept_as_the_largest() -> None:
    made = StepRing(2)
    made.add(1.0, 0.1, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20)
    (step,) = made.between(0.0, 1.0)
    assert (step.tokens, step.rows, step.prompt_tokens) == (65_535, 65_535, 65_535)
    assert (step.prompts, step.preempted) == (255, 255)
