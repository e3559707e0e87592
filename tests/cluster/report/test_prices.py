import pytest

from cluster.report.prices import Price, parse_prices, read_prices
from engine.errors import ConfigError


def test_prices_are_by_unit_and_replica():
    table = parse_prices(["gpu=2.5x4x2", "cpu=0.05"], "EUR")
    assert table is not None
    assert table.items == (
        Price(name="gpu", per_hour=2.5, units=4, replicas=2),
        Price(name="cpu", per_hour=0.05),
    )
    assert table.per_hour == pytest.approx(20.05)
    assert table.to_json()["currency"] == "EUR"


def test_no_price_is_no_table():
    assert parse_prices([]) is None


def test_a_table_in_yaml_says_the_same(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text(
        "currency: EUR\nitems:\n- {name: gpu, per_hour: 2.5, units: 4, replicas: 2}\n"
        "- {name: cpu, per_hour: 0.05}\n"
    )
    assert read_prices(file) == parse_prices(["gpu=2.5x4x2", "cpu=0.05"], "EUR")


@pytest.mark.parametrize("text", ["gpu", "=1", "gpu=", "gpu=1x2x3x4", "gpu=cheap"])
def test_what_is_no_price_is_refused(text):
    with pytest.raises(ConfigError, match="NAME=PER_HOUR"):
        parse_prices([text])


def test_a_negative_price_is_refused():
    with pytest.raises(ConfigError, match=r"per_hour=-1\.0"):
        parse_prices(["gpu=-1"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "items"),
        ("items: []", "items"),
        ("items: [{name: a}]", "per_hour"),
        ("items: [{name: a, per_hour: x}]", "could not convert"),
        ("items: [{name: a, per_hour: 1, unit: 2}]", "'unit'"),
        ("prices: 1\nitems: [{name: a, per_hour: 1}]", "'prices'"),
        ("items: [", "not a price table"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(tmp_path, text, says):
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prices(file)
