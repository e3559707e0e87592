import pytest

from cluster.report.targets import DEFAULT_TARGETS, Targets, parse_slo, targets_of
from engine.errors import ConfigError


def test_targets_of_a_tier_replace_its_default_whole():
    slo = parse_slo(["default:ttft=0.3,itl=0.05", "gold:e2e=2"])
    assert targets_of(slo, "default") == Targets(ttft_s=0.3, itl_s=0.05)
    assert targets_of(slo, "gold") == Targets(e2e_s=2.0)
    assert targets_of(slo, "priority") == DEFAULT_TARGETS["priority"]


def test_a_star_is_every_tier_that_is_not_named():
    slo = parse_slo(["*:ttft=9", "batch:"])
    assert targets_of(slo, "priority") == Targets(ttft_s=9.0)
    assert targets_of(slo, "batch") == Targets()


def test_an_unknown_tier_has_the_targets_of_every_tier():
    assert targets_of(DEFAULT_TARGETS, "gold") == DEFAULT_TARGETS["*"]


def test_targets_are_multiplied_where_there_are_any():
    assert Targets(ttft_s=0.5).times(4) == Targets(ttft_s=2.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft=1", "TIER:"),
        (":ttft=1", "TIER:"),
        ("default:tpot=1", "'tpot' is no target; there are ttft, itl, e2e"),
        ("default:ttft=soon", "'soon' is not a number"),
        ("default:ttft=0", "ttft_s=0.0"),
        ("default:ttft=nan", "ttft_s=nan"),
    ],
)
def test_what_is_no_target_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_slo([text])
