import xml.etree.ElementTree as ET

import pytest

from cluster.report.chart import Axis, Guide, Series, Stack, chart, number, stacked

X, Y = Axis(label="time, s", low=0.0), Axis(label="latency, s", log=True)


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in parsed(svg).iter() if each.tag.endswith("}text")]


def test_a_chart_is_well_formed_and_says_what_it_shows():
    series = [Series(name="a & b <c>", xs=[0, 1, 2], ys=[0.1, 1.0, 10.0])]
    svg = chart("TTFT", "how long it took", series, x=X, y=Y, guides=[Guide(name="goal", y=2)])
    root = parsed(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "TTFT. how long it took"
    assert {"a & b <c>", "goal", "time, s", "latency, s", "0.1", "10"} <= set(texts(svg))


@pytest.mark.parametrize("ys", [[], [float("nan")], [float("inf")]])
def test_a_chart_of_nothing_says_so(ys):
    svg = chart("T", "d", [Series(name="a", xs=[1.0] * len(ys), ys=ys)], x=X, y=Y)
    assert texts(svg) == ["nothing was measured here"]


@pytest.mark.parametrize(
    ("xs", "ys"),
    [([1.0], [1.0]), ([0.0, 0.0], [0.0, 0.0]), ([5, 5], [1e-9, 1e9]), ([0, 1], [-3.0, -3.0])],
)
@pytest.mark.parametrize("log", [False, True])
def test_any_finite_points_can_be_drawn(xs, ys, log):
    svg = chart("T", "d", [Series(name="a", xs=xs, ys=ys, kind="scatter")], x=X,
                y=Axis(label="y", log=log))  # fmt: skip
    assert "nan" not in svg
    assert "inf" not in svg
    parsed(svg)


def test_a_gap_in_the_values_lifts_the_pen():
    series = [Series(name="a", xs=[0, 1, 2, 3], ys=[1.0, 2.0, float("nan"), 3.0])]
    svg = chart("T", "d", series, x=X, y=Axis(label="y"))
    (line,) = (
        e for e in parsed(svg).iter() if e.get("class") == "line s0" and "L" in e.get("d", "")
    )
    assert line.get("d", "").count("M") == 2


def test_a_scatter_of_very_many_points_is_thinned_but_keeps_its_extremes():
    n = 50_000
    ys = [1.0] * n
    ys[31_337] = 99.0
    svg = chart("T", "d", [Series(name="a", xs=list(range(n)), ys=ys, kind="scatter")], x=X,
                y=Axis(label="y"))  # fmt: skip
    (dots,) = (e for e in parsed(svg).iter() if e.get("class") == "dot s0")
    points = dots.get("d", "").split("M")[1:]
    assert len(points) <= 6000
    assert len({point.split()[1] for point in points}) == 2


def test_stacked_bars_have_a_piece_for_each_part_that_can_be_seen():
    svg = stacked("P", "d", [Stack(name="mean", parts=[1.0, 0.0, 3.0])], ["a", "b", "c"],
                  x=Axis(label="s"))  # fmt: skip
    pieces = [e for e in parsed(svg).iter() if e.tag.endswith("}rect") and e.get("height") == "26"]
    widths = [float(each.get("width", 0)) for each in pieces]
    assert len(widths) == 2
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)


def test_stacks_of_nothing_say_so():
    svg = stacked("P", "d", [], ["a"], x=Axis(label="s"))
    assert texts(svg) == ["nothing was measured here"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2e-15, "0"), (0.00123456, "0.00123"), (1.5, "1.5"), (123.456, "123"),
     (12345.6, "12,346"),
     (0.1 + 0.2, "0.3"), (1e9, "1.00e+09"), (-2.5, "-2.5"), (100.0, "100")],
)  # fmt: skip
def test_numbers_have_three_digits(value, text):
    assert number(value) == text
