import pytest

from cluster import config as configuration
from cluster.compare.edits import Edit, edited
from engine.errors import ConfigError


@pytest.fixture(scope="module")
def packaged():
    return configuration.load()


def made(config, *texts):
    return edited(config, [Edit.parse(text) for text in texts], label="edited").data


def model(data):
    return next(each for each in data["applications"] if each["name"] == "smollm2-135m")


def deployment(data, name):
    return next(
        each
        for application in data["applications"]
        for each in application["deployments"]
        if each["name"] == name
    )


def test_short_paths_mean_every_model_and_every_deployment_of_a_name(packaged):
    data = made(
        packaged,
        "args.block_tokens=32",
        "Decode.user_config.local_prefill_tokens=0",
        "Prefill.num_replicas=2",
    )
    assert model(data)["args"]["block_tokens"] == 32
    assert deployment(data, "Decode")["user_config"] == {"local_prefill_tokens": 0}
    assert deployment(data, "Prefill")["num_replicas"] == 2


def test_a_whole_path_names_elements_of_lists(packaged):
    data = made(
        packaged,
        "http_options.port=9000",
        "applications.smollm2-135m.args.dtype=float32",
        "applications.gateway.deployments.Gateway.user_config.limits.default_max_tokens=7",
    )
    assert data["http_options"]["port"] == 9000
    assert model(data)["args"]["dtype"] == "float32"
    limits = deployment(data, "Gateway")["user_config"]["limits"]
    assert limits["default_max_tokens"] == 7


def test_the_configuration_that_was_edited_stays_as_it_was(packaged):
    before = packaged.data["http_options"]["port"]
    made(packaged, "http_options.port=9001")
    assert packaged.data["http_options"]["port"] == before


def test_no_edit_gives_the_configuration_itself(packaged):
    assert edited(packaged, [], label="x") is packaged


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("args.block_tokens", "PATH=VALUE"),
        ("args..x=1", "PATH=VALUE"),
        ("args.x={", "not YAML"),
        ("args.block_token=32", "did you mean 'block_tokens'"),
        ("args.block_tokens=0", "block_tokens"),
        ("Decode=1", "say what of Decode"),
        ("http_option.port=1", "did you mean 'http_options'"),
        ("applications.smollm.args.dtype=float32", "did you mean 'smollm2-135m'"),
        ("http_options.port.number=1", "has no 'number'"),
    ],
)
def test_an_edit_that_leads_nowhere_says_why(packaged, text, says):
    with pytest.raises(ConfigError, match=says):
        made(packaged, text)


@pytest.mark.parametrize("text", ["a.b=1", "a.b=true", "a.b={x: [1, 2]}", "a.b=word"])
def test_an_edit_reads_as_it_was_written(text):
    assert str(Edit.parse(text)) == text
