import pytest

from dashboards.promql import Selector, read


@pytest.mark.parametrize(
    ("expr", "selectors", "grouping"),
    [
        ("up", [("up", ())], set()),
        ('up{job="a", x=~"b|c"}', [("up", (("job", "a"), ("x", "b|c")))], set()),
        ("sum by (a, b) (rate(x_total[5m]))", [("x_total", ())], {"a", "b"}),
        ("sum(rate(x_total[$window])) by (a)", [("x_total", ())], {"a"}),
        ("vllm:x_total offset 5m", [("vllm:x_total", ())], set()),
        ("a / on (job) group_left (x) b", [("a", ()), ("b", ())], {"job", "x"}),
        ("a > bool 1 and b unless c", [("a", ()), ("b", ()), ("c", ())], set()),
        ("$price * max(a) / 3600 > 1e6", [("a", ())], set()),
        ('a{x="}", y!=")"}', [("a", (("x", "}"), ("y", ")")))], set()),
        ("histogram_quantile(0.99, sum by (le) (rate(a_bucket[1h:5m])))",
         [("a_bucket", ())], {"le"}),
        ("topk(3, sum without (x) (a))", [("a", ())], {"x"}),
        ('count_values by (job) ("v", a)', [("a", ())], {"job"}),
        ("vector(14.4)", [], set()),
    ],
)  # fmt: skip
def test_metrics_labels_and_groupings_are_found(expr, selectors, grouping):
    reading = read(expr)
    assert reading.selectors == tuple(Selector(name, labels) for name, labels in selectors)
    assert reading.grouping == grouping


@pytest.mark.parametrize("expr", ['{__name__="a"}', "sum by (a (b)"])
def test_what_cannot_be_judged_is_refused(expr):
    with pytest.raises(ValueError, match=r"without a metric name|not closed"):
        read(expr)
