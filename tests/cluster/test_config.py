from __future__ import annotations

from pathlib import Path

import pytest

from cluster import config
from engine.errors import ConfigError

APP = """\
from ray import serve

def build(args): ...
class Policy: ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "myapp.py").write_text(APP)
    return tmp_path


def load(folder: Path, text: str) -> config.ServeConfig:
    file = folder / "serve.yaml"
    file.write_text(text)
    return config.load(file)


def refused(folder: Path, text: str) -> str:
    """The message, with the folder's own name cut out."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


def app(*lines: str, import_path: str = "myapp:build") -> str:
    """A file with one application; `lines` are further keys of it."""
    return "\n".join(
        ["applications:", "- name: a", f"  import_path: {import_path}", *(f"  {x}" for x in lines)]
    )


def deployment(*lines: str) -> str:
    return app("deployments:", "- name: D", *(f"  {line}" for line in lines))


def gateway_and_model(*, model: str = "", gateway: str = "") -> str:
    return f"""\
applications:
- name: gateway
  import_path: deployments.app:gateway
  deployments:
  - name: Gateway
    max_surge_percent: 100
    user_config:
      models: [{{name: m, app: m}}]
{gateway}
- name: m
  import_path: deployments.app:model
  route_prefix: null
  runtime_env:
    env_vars: {{RAY_SERVE_ENABLE_HA_PROXY: "0", RAY_SERVE_ENABLE_DIRECT_INGRESS: "0"}}
  args: {{name: m, source: fake}}
{model}
"""


# The packaged file


def test_the_packaged_file_is_the_one_at_the_top_of_the_repository():
    top = Path(config.__file__).parent.parent / "config.yaml"
    assert top.resolve() == config.DEFAULT_PATH.resolve()


def test_the_packaged_file_passes_without_a_warning():
    checked = config.load()
    assert checked.applications == ["gateway", "smollm2-135m"]
    assert (checked.host, checked.port) == ("127.0.0.1", 8000)
    assert checked.warnings == ()
    assert checked.code_dir is None


def test_every_replica_is_counted_twice_because_an_update_starts_the_new_ones_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config.os, "cpu_count", lambda: 1)
    checked = load(folder, deployment("num_replicas: 3", "ray_actor_options: {num_cpus: 0.5}"))
    assert checked.needed_cpus() == 3


def ranked(*deployments: str, args: str = "tensor_parallel: 2") -> str:
    pools = "\n".join(["  deployments:", *(f"  - {{{options}}}" for options in deployments)])
    text = gateway_and_model(model=pools)
    return text.replace("source: fake", f"source: tiny, {args}")


def test_memory_of_a_replica_with_ranks_is_refused(folder: Path):
    text = ranked("name: Decode, max_surge_percent: 100, ray_actor_options: {memory: 1000000}")
    assert (
        "deployments[0].ray_actor_options.memory: 1000000: a replica with ranks runs in a "
        "placement group whose first bundle has CPUs alone"
    ) in refused(folder, text)


def test_ranks_are_counted_and_prefill_may_have_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config.os, "cpu_count", lambda: 1)
    pools = ("name: Decode, num_replicas: 2", "name: Prefill, num_replicas: 1")
    gateway = 1
    checked = load(folder, ranked(*pools))
    assert checked.needed_cpus() == 2 * (gateway + 3 * 1.5)
    checked = load(folder, ranked(*pools, args="tensor_parallel: 2, prefill_tensor_parallel: 4"))
    assert checked.needed_cpus() == 2 * (gateway + 2 * 1.5 + 2.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("placement_group_bundles: [{CPU: 1}]", "gets its own placement_group_bundles"),
        ("ray_actor_options: {num_cpus: 2}", "2: of a replica with ranks, itself"),
    ],
)
def test_a_replica_with_ranks_is_placed_by_the_builder(folder: Path, options: str, said: str):
    assert said in refused(folder, ranked(f"name: Decode, {options}"))


OVERLAP = "name: {}, max_surge_percent: 100, user_config: {{overlap: {}}}"


@pytest.mark.parametrize(
    ("args", "pool", "ranks"),
    [
        ("tensor_parallel: 2", "Decode", 2),
        ("tensor_parallel: 4", "Prefill", 4),
        ("prefill_tensor_parallel: 2", "Prefill", 2),
        ("tensor_parallel: 2, pipeline_parallel: 2, prefill_pipeline_parallel: 1", "Prefill", 2),
    ],
)
@pytest.mark.parametrize("true", ["true", "1"])
def test_overlap_is_refused_for_ranks_of_one_stage(
    folder: Path, args: str, pool: str, ranks: int, true: str
):
    assert (
        f"deployments[0].user_config.overlap: true: {ranks} ranks of one stage (tensor_parallel: "
        f"{ranks}, pipeline_parallel: 1) plan each step after the last one; leave it out"
    ) in refused(folder, ranked(OVERLAP.format(pool, true), args=args))


@pytest.mark.parametrize(
    ("args", "pool", "overlap"),
    [
        ("tensor_parallel: 2", "Decode", "false"),
        ("tensor_parallel: 2, pipeline_parallel: 2", "Decode", "true"),
        ("prefill_tensor_parallel: 2", "Decode", "true"),
        ("tensor_parallel: 2, prefill_tensor_parallel: 1", "Prefill", "true"),
    ],
)
def test_overlap_is_for_one_rank_or_several_stages(
    folder: Path, args: str, pool: str, overlap: str
):
    load(folder, ranked(OVERLAP.format(pool, overlap), args=args))


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ("accelerator: gpu", "num_cpus: 1", "num_gpus: missing; a replica with accelerator: gpu"),
        ("accelerator: cpu", "num_gpus: 1", "num_gpus: 1: the model is computed on the CPU"),
        (
            "accelerator: gpu, tensor_parallel: 2",
            "num_gpus: 1",
            "num_gpus: 1: the ranks of a replica have the GPUs",
        ),
    ],
)
def test_gpus_are_asked_for_where_they_are_used(folder: Path, args: str, options: str, said: str):
    pool = f"name: Decode, ray_actor_options: {{{options}}}"
    assert said in refused(folder, ranked(pool, args=args))


def test_a_file_without_http_options_listens_on_this_machine_only(folder: Path):
    checked = load(folder, app())
    assert checked.data["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_another_port_is_a_new_value(folder: Path):
    checked = load(folder, app())
    assert checked.listening_on("127.0.0.1", 9).port == 9
    assert checked.port == 8000


def test_an_application_beside_the_file_makes_its_folder_importable(folder: Path):
    assert load(folder, app()).code_dir == folder


# What cannot be read


def test_a_missing_file_says_what_to_give(folder: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read it \(No such file"):
        config.load(folder / "none.yaml")


def test_a_directory_is_not_a_configuration(folder: Path):
    with pytest.raises(ConfigError, match="cannot read it"):
        config.load(folder)


def test_malformed_yaml_gives_line_and_column(folder: Path):
    message = refused(folder, "applications:\n- name: a\n  import_path: [x\n")
    assert message.startswith("serve.yaml:4:1: not YAML: expected ',' or ']'")


def test_a_tab_gives_line_and_column(folder: Path):
    message = refused(folder, "applications:\n\t- name: a\n")
    assert message.startswith("serve.yaml:2:1: not YAML: found character '\\t'")


def test_bytes_that_are_not_utf8_give_line_and_column(folder: Path):
    file = folder / "serve.yaml"
    file.write_bytes(b"applications:\n- name: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"serve\.yaml:2:9: not text: byte 0xff"):
        config.load(file)


def test_control_characters_give_line_and_column(folder: Path):
    assert refused(folder, "a: 1\nb: \x00\n").startswith("serve.yaml:2:4: not text: character #x00")


def test_a_model_file_is_refused_for_its_size_before_it_is_read(folder: Path):
    file = folder / "model.gguf"
    with open(file, "wb") as large:
        large.truncate(config.MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="1048577 bytes; a configuration has at most 1048576"):
        config.load(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n", "serve.yaml:1:1: a list, not a mapping"),
        ("when: 2024-13-45\n", "put the value in quotes"),
        ("[" * 3000, "nested too deep"),
    ],
)
def test_what_is_no_configuration_is_named(folder: Path, text: str, words: str):
    assert words in refused(folder, text)


def test_a_key_set_twice_names_both_lines(folder: Path):
    message = refused(folder, app("route_prefix: /", "route_prefix: /b"))
    assert message == (
        "serve.yaml:5:3: applications[0].route_prefix is set twice (first on line 4); keep one"
    )


def test_aliases_of_aliases_do_not_take_for_ever(folder: Path):
    bomb = ["a0: &a0 [x, x]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "unknown key" in refused(folder, "\n".join(bomb) + "\napplications: []\n")


# What Serve would ignore or find out too late: (file, place, message)

CASES: list[tuple[str, str, str, str]] = [
    (
        "top-level typo",
        "http_option: {port: 1}\n" + app(),
        "serve.yaml:1:1",
        "http_option: unknown key; did you mean 'http_options'?",
    ),
    (
        "application typo",
        app("route_prefx: /"),
        "serve.yaml:4:3",
        "applications[0].route_prefx: unknown key; did you mean 'route_prefix'?",
    ),
    (
        "deployment typo",
        deployment("num_replica: 2"),
        "serve.yaml:6:5",
        "applications[0].deployments[0].num_replica: unknown key; did you mean 'num_replicas'?",
    ),
    (
        "actor option typo",
        deployment("ray_actor_options: {num_cpu: 1}"),
        "serve.yaml:6:25",
        "applications[0].deployments[0].ray_actor_options.num_cpu: unknown key; "
        "did you mean 'num_cpus'?",
    ),
    (
        "autoscaling typo",
        deployment("autoscaling_config: {max_replica: 3}"),
        "serve.yaml:6:26",
        "applications[0].deployments[0].autoscaling_config.max_replica: unknown key; "
        "did you mean 'max_replicas'?",
    ),
    (
        "runtime_env typo",
        app("runtime_env: {env_var: {}}"),
        "serve.yaml:4:17",
        "applications[0].runtime_env.env_var: unknown key; did you mean 'env_vars'?",
    ),
    (
        "environment value that is no string",
        app("runtime_env: {env_vars: {A: 0}}"),
        "serve.yaml:4:28",
        'applications[0].runtime_env.env_vars.A: 0: environment variables are strings; write "0" '
        "in quotes",
    ),
    (
        "bounds",
        deployment("autoscaling_config: {min_replicas: 4, max_replicas: 2}"),
        "serve.yaml:6:26",
        "applications[0].deployments[0].autoscaling_config.min_replicas: min_replicas=4 is above "
        "max_replicas=2; raise max_replicas or lower min_replicas",
    ),
    (
        "initial outside the bounds",
        deployment("autoscaling_config: {min_replicas: 1, initial_replicas: 9, max_replicas: 2}"),
        "serve.yaml:6:43",
        "applications[0].deployments[0].autoscaling_config.initial_replicas: 9: must be between "
        "min_replicas=1 and max_replicas=2",
    ),
    (
        "replicas fixed and scaled",
        deployment("num_replicas: 2", "autoscaling_config: {max_replicas: 3}"),
        "serve.yaml:5:5",
        "applications[0].deployments[0]: manually setting num_replicas is not allowed when "
        "autoscaling_config is provided.",
    ),
    (
        "no replicas",
        deployment("num_replicas: 0"),
        "serve.yaml:6:5",
        "applications[0].deployments[0].num_replicas: 0: input should be greater than 0",
    ),
    (
        "word for a number",
        "http_options: {port: eight}\n" + app(),
        "serve.yaml:1:16",
        "http_options.port: 'eight': input should be a valid integer, unable to parse string as "
        "an integer",
    ),
    (
        "port out of range",
        "http_options: {port: 70000}\n" + app(),
        "serve.yaml:1:16",
        "http_options.port: 70000: a port is between 1 and 65535",
    ),
    (
        "route without slash",
        app("route_prefix: v1"),
        "serve.yaml:4:3",
        "applications[0].route_prefix: 'v1': must start with '/'; write '/v1', or null",
    ),
    (
        "route with a slash too many",
        app("route_prefix: /v1/"),
        "serve.yaml:4:3",
        "applications[0].route_prefix: '/v1/': must not end with '/'; write '/v1'",
    ),
    (
        "no import path",
        "applications:\n- name: a\n",
        "serve.yaml:2:3",
        "applications[0].import_path: missing; it is required",
    ),
    (
        "module that is not there",
        app(import_path="deployment.app:gateway"),
        "serve.yaml:3:3",
        "no module named 'deployment.app'; it must be installed, or lie in ",
    ),
    (
        "attribute that is not there",
        app(import_path="myapp:biuld"),
        "serve.yaml:3:3",
        "applications[0].import_path: 'myapp:biuld': myapp has no 'biuld'; did you mean 'build'?",
    ),
    (
        "policy that is not there",
        app('autoscaling_policy: {policy_function: "myapp:polcy"}'),
        "serve.yaml:4:24",
        "applications[0].autoscaling_policy.policy_function: 'myapp:polcy': myapp has no 'polcy'; "
        "did you mean 'Policy'?",
    ),
    (
        "deployment twice",
        app("deployments:", "- name: D", "- name: D"),
        "serve.yaml:6:5",
        "applications[0].deployments[1].name: 'D' is configured twice in application 'a'; keep one",
    ),
    (
        "applications that are no list",
        "applications: 3\n",
        "serve.yaml:1:1",
        "applications: 3: input should be a valid list",
    ),
]


@pytest.mark.parametrize(("text", "place", "message"), [c[1:] for c in CASES], ids=[
    c[0] for c in CASES
])  # fmt: skip
def test_what_serve_would_let_pass_is_refused_with_its_place(
    folder: Path, text: str, place: str, message: str
):
    said = refused(folder, text)
    assert said.startswith(f"{place}: ")
    assert message in said
    assert said.count("\n") == 0


def test_all_problems_are_reported_at_once_in_the_files_order(folder: Path):
    message = refused(folder, deployment("max_surge: 1", "num_replica: 2") + "\nproxy: x\n")
    assert [line.split(": ")[0] for line in message.splitlines()] == [
        "serve.yaml:6:5",
        "serve.yaml:7:5",
        "serve.yaml:8:1",
    ]


def test_code_that_comes_with_the_runtime_environment_is_not_looked_for(folder: Path):
    checked = load(
        folder, app('runtime_env: {working_dir: "local:///srv/app"}', import_path="elsewhere:app")
    )
    assert checked.code_dir is None


# Our own applications


def test_a_gateway_and_a_model_pass(folder: Path):
    assert load(folder, gateway_and_model()).applications == ["gateway", "m"]


def test_the_models_a_file_promises_are_known(folder: Path):
    assert load(folder, gateway_and_model()).models == {"m"}
    assert load(folder, app()).models == set()


def test_args_of_a_model_are_checked_against_its_own_model(folder: Path):
    text = gateway_and_model().replace("source: fake", "source: fake, kv_memory_byte: 1")
    assert refused(folder, text) == (
        "serve.yaml:15:33: applications[1].args.kv_memory_byte: unknown key; "
        "did you mean 'kv_memory_bytes'?"
    )


def test_user_config_of_the_gateway_is_checked(folder: Path):
    text = gateway_and_model(gateway="      limits: {max_n: 1000}")
    assert refused(folder, text) == (
        "serve.yaml:9:16: applications[0].deployments[0].user_config.limits.max_n: 1000: "
        "input should be less than or equal to 128"
    )


def test_user_config_of_a_pool_is_checked(folder: Path):
    text = gateway_and_model(
        model="  deployments:\n  - {name: Decode, max_surge_percent: 100, "
        "user_config: {max_step_tokens: -1}}"
    )
    assert "user_config.max_step_tokens: -1: input should be greater than or equal to 1" in refused(
        folder, text
    )


def test_a_deployment_the_code_does_not_have_is_refused(folder: Path):
    text = gateway_and_model(model="  deployments: [{name: Decoder}]")
    assert (
        "applications[1].deployments[0].name: 'Decoder': deployments.app:model has no such "
        "deployment; did you mean 'Decode'?"
    ) in refused(folder, text)


def test_a_model_with_a_route_of_its_own_is_refused(folder: Path):
    text = gateway_and_model().replace("route_prefix: null", "route_prefix: /m")
    assert "write route_prefix: null" in refused(folder, text)


def test_a_model_that_would_open_its_own_port_is_refused(folder: Path):
    text = gateway_and_model().replace(', RAY_SERVE_ENABLE_DIRECT_INGRESS: "0"', "")
    assert "runtime_env.env_vars.RAY_SERVE_ENABLE_DIRECT_INGRESS: None: must be" in refused(
        folder, text
    )


def test_a_route_to_an_application_that_is_not_in_the_file_is_refused(folder: Path):
    text = gateway_and_model().replace("app: m}", "app: n}")
    assert ("user_config.models[0].app: 'n': no application of that name in this file") in refused(
        folder, text
    )


def test_a_pool_of_one_that_an_update_would_empty_gives_a_warning(folder: Path):
    checked = load(folder, gateway_and_model(model="  deployments: [{name: Decode}]"))
    assert [w.split(": ", 1)[1] for w in checked.warnings] == [
        "m/Decode has one replica and no max_surge_percent: an update stops it before its "
        "successor is there; set max_surge_percent: 100"
    ]


def test_a_model_file_is_found_relative_to_the_configuration(folder: Path):
    (folder / "m.gguf").write_bytes(b"")
    checked = load(folder, gateway_and_model().replace("source: fake", "source: m.gguf"))
    assert checked.data["applications"][1]["args"]["source"] == str(folder / "m.gguf")
