"""Files for Grafana, Prometheus, Ray and Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dashboards.alerts import alerts
from dashboards.boards import boards
from dashboards.command import dashboards as command
from dashboards.errors import DashboardError
from dashboards.everything import checked
from dashboards.export import RAY_OUTPUT_VARIABLE, export, export_to_ray
from dashboards.ray_names import JOB, ray_names
from engine.metrics import CATALOGUE

UIDS = {board.uid for board in boards()}


def test_every_form_is_written_and_nothing_else(tmp_path: Path) -> None:
    written = export(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in written} == {
        *(f"dashboards/{uid}.json" for uid in UIDS),
        *(f"rules/{name}.yaml" for name in ("tailrace.rules", "tailrace.alerts")),
        *("rules/ray-names.rules.yaml", "provisioning/dashboards.yaml"),
        *("kubernetes/dashboards.yaml", "kubernetes/rules.yaml"),
    }
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(written)
    for uid in UIDS:
        value = json.loads((tmp_path / f"dashboards/{uid}.json").read_text())
        assert value == next(v for v in checked() if v["uid"] == uid)
    provider = yaml.safe_load((tmp_path / "provisioning/dashboards.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == str(tmp_path / "dashboards")


def test_a_second_export_removes_what_is_no_longer_there_and_leaves_other_files(
    tmp_path: Path,
) -> None:
    export(tmp_path)
    former, other = tmp_path / "dashboards/tailrace-former.json", tmp_path / "dashboards/mine.json"
    former.write_text("{}")
    other.write_text("{}")
    export(tmp_path)
    assert (former.exists(), other.exists()) == (False, True)


def test_config_maps_carry_the_label_that_grafanas_sidecar_looks_for(tmp_path: Path) -> None:
    export(tmp_path)
    maps = list(yaml.safe_load_all((tmp_path / "kubernetes/dashboards.yaml").read_text()))
    assert {m["kind"] for m in maps} == {"ConfigMap"}
    assert {m["metadata"]["labels"]["grafana_dashboard"] for m in maps} == {"1"}
    held = {name: json.loads(text) for m in maps for name, text in m["data"].items()}
    assert set(held) == {f"{uid}.json" for uid in UIDS}
    assert all(len(json.dumps(m)) < 1_000_000 for m in maps), "etcd takes no more"


@pytest.mark.parametrize("ray", [False, True])
def test_prometheus_rules_hold_the_groups_for_the_way_of_scraping(
    tmp_path: Path, ray: bool
) -> None:
    export(tmp_path, runbook="https://r", ray_names_too=ray)
    document = yaml.safe_load((tmp_path / "kubernetes/rules.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == (
        "monitoring.coreos.com/v1",
        "PrometheusRule",
    )
    groups = {group["name"]: group for group in document["spec"]["groups"]}
    assert set(groups) >= {"tailrace-service-level", *(group.name for group in alerts())}
    assert ("tailrace-ray-names" in groups) is ray
    (away,) = [
        rule
        for rule in groups["tailrace-queue-alerts"]["rules"]
        if rule["alert"] == "TailraceQueueAway"
    ]
    assert away["annotations"]["runbook_url"] == "https://r#tailracequeueaway"


def test_rays_names_are_mapped_for_every_series_of_the_catalogue() -> None:
    rules = {rule.record: rule for rule in ray_names().recordings}
    parts = {"counter": 1, "gauge": 1, "histogram": 3}
    assert len(rules) == sum(parts[metric.kind] for metric in CATALOGUE.values())
    running = rules["vllm:num_requests_running"]
    assert running.expr == (
        "max by (model_name, replica) (last_over_time(ray_vllm_num_requests_running[1m]))"
    )
    assert running.constant == (("job", JOB),)
    bucket = rules["tailrace_request_ttft_seconds_bucket"]
    assert "le" in bucket.labels
    assert "streaming" in bucket.labels


def test_rays_own_grafana_finds_them_beside_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "metrics/grafana/dashboards"
    directory.mkdir(parents=True)
    (directory / "default_grafana_dashboard.json").write_text("{}")
    written = export_to_ray(tmp_path, {})
    assert {path.parent for path in written} == {directory}
    assert {json.loads(path.read_text())["uid"] for path in written} == UIDS
    assert all(path.name.endswith("_grafana_dashboard.json") for path in written)
    assert (directory / "default_grafana_dashboard.json").read_text() == "{}"


def test_where_ray_was_told_to_put_its_dashboards_is_where_ours_go(tmp_path: Path) -> None:
    written = export_to_ray(Path("/nowhere"), {RAY_OUTPUT_VARIABLE: str(tmp_path)})
    assert {path.parent for path in written} == {tmp_path}


def test_a_session_without_rays_dashboards_is_told(tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match=r"no such directory.*dashboard runs"):
        export_to_ray(tmp_path, {})


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "dashboards").write_text("a file where the folder should be")
    with pytest.raises(DashboardError, match="choose another place"):
        export(tmp_path)


def test_the_command_needs_a_place_and_lists_what_it_wrote(tmp_path: Path) -> None:
    nowhere = CliRunner().invoke(command, ["export"])
    assert (nowhere.exit_code, "DIRECTORY, --ray SESSION or both" in nowhere.output) == (2, True)
    done = CliRunner().invoke(command, ["export", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["files"]) == len(UIDS) + 6
