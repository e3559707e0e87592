import pytest

from cluster import config as configuration
from cluster.compare.ready import READY, ladder
from engine.errors import ConfigError


@pytest.fixture(scope="module")
def packaged():
    return configuration.load()


def deployments(config):
    model = next(a for a in config.data["applications"] if a["name"] == "smollm2-135m")
    return {each["name"]: each for each in model["deployments"]}, model["args"]


def test_together_has_as_many_replicas_and_no_prefill_pool(packaged):
    apart, together = READY["pd"].variants(packaged)
    assert apart.config is packaged
    pools, args = deployments(together.config)
    assert set(pools) == {"Decode"}
    assert pools["Decode"]["num_replicas"] == 2
    assert args["prefill"] is False
    assert together.changes == ("smollm2-135m: no Prefill, 2 Decode replicas",)


def test_what_is_together_already_cannot_be_put_together(packaged):
    _, together = READY["pd"].variants(packaged)
    with pytest.raises(ConfigError, match="no model in it has a prefill and a decode pool"):
        READY["pd"].variants(together.config)


@pytest.mark.parametrize("name", sorted(READY))
def test_every_ready_comparison_can_be_had_of_the_packaged_configuration(packaged, name):
    variants = READY[name].variants(packaged)
    assert len({each.name for each in variants}) == len(variants) >= 2
    datas = [each.config.data for each in variants]
    assert all(data != other for i, data in enumerate(datas) for other in datas[:i])


def test_rungs_of_a_ladder_keep_what_was_switched_on_before(packaged, tmp_path):
    file = tmp_path / "ladder.yaml"
    file.write_text(
        "- {name: bare, set: {args.prefix_caching: false, "
        "Decode.user_config.local_prefill_tokens: 0}}\n"
        "- {name: cache, set: {args.prefix_caching: true}}\n"
        "- {name: local, set: {Decode.user_config.local_prefill_tokens: 64}}\n"
    )
    rungs = ladder(packaged, file)
    told = []
    for rung in rungs:
        pools, args = deployments(rung.config)
        local = pools["Decode"]["user_config"]["local_prefill_tokens"]
        told.append((rung.name, args["prefix_caching"], local))
    assert told == [("bare", False, 0), ("cache", True, 0), ("local", True, 64)]
    assert rungs[1].changes == ("args.prefix_caching=true",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "two rungs or more"),
        ("- {name: a, set: {}}", "two rungs or more"),
        ("- {name: a}\n- {name: b, set: {}}", "`name` and `set`"),
        ("- {name: a, set: 1}\n- {name: b, set: {}}", "must map paths"),
        ("- {name: a, set: {args.nothing: 1}}\n- {name: b, set: {}}", "nothing"),
        ("{", "ladder"),
    ],
)
def test_a_ladder_that_cannot_be_climbed_says_why(packaged, tmp_path, text, says):
    file = tmp_path / "ladder.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        ladder(packaged, file)
