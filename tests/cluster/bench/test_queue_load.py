import pytest

from cluster.bench.queue_load import INTERACTIVE, Caller, best_course, mixed_callers, report_of


def test_the_best_course_of_the_mixed_load_wastes_no_slot_and_serves_interactive_next():
    callers = mixed_callers()
    course = best_course(callers, slots=2, service_s=0.1)
    assert course.makespan_s == pytest.approx(1.0)
    # They come at 10 to 40 ms and get the slots of 0.1 and 0.2 s, two each.
    assert course.started_s[16:] == pytest.approx([0.1, 0.1, 0.2, 0.2])
    assert course.worst_start_s(callers, INTERACTIVE) == pytest.approx(0.17)


def test_no_more_run_at_once_than_there_are_slots():
    callers = mixed_callers(7, 3)
    course = best_course(callers, slots=3, service_s=0.1)
    for at in course.started_s:
        running = [
            i
            for i, (start, end) in enumerate(zip(course.started_s, course.ended_s, strict=True))
            if start <= at < end - 1e-9
        ]
        assert len(running) <= 3


def test_a_lone_caller_starts_when_it_comes():
    course = best_course([Caller(0.5, INTERACTIVE)], slots=2, service_s=0.1)
    assert (course.started_s, course.ended_s) == ((0.5,), (0.6,))


def test_a_report_lists_grants_and_counts_them_by_rank():
    report = report_of([(1, 7, 0), (1, 8, 30), (1, 9, 30)], 4)
    assert report.grants == ((1, 7, 1), (1, 8, 1), (1, 9, 1))
    assert report.alive == ((0, None, 1, 1), (30, None, 2, 2))
