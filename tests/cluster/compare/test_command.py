import json

import pytest
from click.testing import CliRunner

from cluster.compare.command import _loads, _variants, compare
from cluster.compare.contest import Load, Record
from cluster.compare.ready import READY
from engine.errors import ConfigError

NOTHING = {
    **dict.fromkeys(("loads", "rate", "users", "requests", "ready", "ladder", "url_b", "peer")),
    **{"time_factor": 1.0, "sets": (), "set_a": (), "set_b": ()},
}


def loads(**options):
    return _loads({**NOTHING, **options})


def variants(*configs, **options):
    return _variants(configs, {**NOTHING, **options})


def test_loads_are_multiples_rates_or_users():
    assert loads() == (Load(multiple=0.8),)
    assert loads(loads="0.5,1.1") == (Load(multiple=0.5), Load(multiple=1.1))
    assert loads(rate="2") == (Load(rate=2.0),)
    assert loads(users="1,8", requests=20) == (Load(users=1), Load(users=8))
    assert loads(time_factor=2.0) == (Load(),)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loads": "0.5", "rate": "1"}, "give one of them"),
        ({"loads": "0.5,0.5"}, "twice"),
        ({"loads": "half"}, "numbers above 0"),
        ({"rate": "-1"}, "numbers above 0"),
        ({"users": "2"}, "say how many"),
        ({"users": "2.5", "requests": 5}, "whole numbers"),
    ],
)
def test_loads_that_cannot_be_meant_say_why(options, says):
    with pytest.raises(ConfigError, match=says):
        loads(**options)


def test_edits_make_a_second_side_of_one_file():
    a, b = variants(sets=("args.dtype=float32",), set_b=("args.block_tokens=32",))
    assert (a.name, b.name) == ("packaged", "packaged 2")
    assert a.changes == ("args.dtype=float32",)
    assert b.changes == ("args.dtype=float32", "args.block_tokens=32")


def test_a_ready_comparison_starts_from_the_edited_file():
    made = variants(ready="pd", sets=("args.num_threads=1",))
    assert [each.name for each in made] == ["apart", "together"]
    for each in made:
        assert each.config.data["applications"][1]["args"]["num_threads"] == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "nothing to be compared with"),
        ({"ready": "p/d"}, "there are pd"),
        ({"ready": "pd", "peer": "vllm"}, "give one of them"),
        ({"peer": "vllm", "set_b": ("args.dtype=float32",)}, "needs a second file"),
    ],
)
def test_sides_that_cannot_be_meant_say_why(options, says):
    with pytest.raises(ConfigError, match=says):
        variants(**options)


def test_the_ready_comparisons_are_listed():
    done = CliRunner().invoke(compare, ["--ready", "list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == list(READY)


def test_a_directory_that_holds_no_contest_is_refused(tmp_path):
    with pytest.raises(Exception, match="not a contest"):
        CliRunner().invoke(compare, ["--again", str(tmp_path)], catch_exceptions=False)


FAKE = """
http_options: {host: 127.0.0.1, port: 8000}
applications:
- name: gateway
  import_path: deployments.app:gateway
  route_prefix: /
  deployments:
  - name: Gateway
    num_replicas: 1
    max_surge_percent: 100
    ray_actor_options: {num_cpus: 0.1}
    user_config: {revision: 1, models: [{name: fake, app: fake}]}
- name: fake
  import_path: deployments.app:model
  route_prefix: null
  runtime_env:
    env_vars: {RAY_SERVE_ENABLE_HA_PROXY: "0", RAY_SERVE_ENABLE_DIRECT_INGRESS: "0"}
  args: {name: fake, source: fake, num_threads: 1}
  deployments:
  - name: Prefill
    num_replicas: 1
    max_surge_percent: 100
    ray_actor_options: {num_cpus: 0.1}
  - name: Decode
    num_replicas: 1
    max_surge_percent: 100
    ray_actor_options: {num_cpus: 0.1}
"""


@pytest.mark.cluster
def test_two_configurations_are_brought_up_in_turn(tmp_path, request):
    config = tmp_path / "fake.yaml"
    config.write_text(FAKE)
    trace = request.config.rootpath / "tests" / "traces" / "azure2023_conv.jsonl"
    arguments = [str(config), "--ready", "pd", "--trace", str(trace), "--rate", "10", "--json"]
    arguments += ["--duration", "2", "--rounds", "1", "--length-factor", "0.1"]
    arguments += ["--max-output", "8", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(compare, arguments)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert [side["name"] for side in said["sides"]] == ["apart", "together"]
    assert {run["requests"] for run in said["runs"]} == {20}
    answered = [run["figures"]["all"]["requests"]["ok"] for run in said["runs"]]
    assert answered == [20, 20]
    pools = {taken.side: taken.pools for taken in Record.load(tmp_path / "out").taken}
    assert set(pools["together"][-1]["running"]) == {"Decode 1", "Decode 2"}
    assert set(pools["apart"][-1]["running"]) == {"Decode 1", "Prefill 1"}
