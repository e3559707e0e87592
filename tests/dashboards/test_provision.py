"""Provisioning, against an HTTP server that keeps Grafana's API contract."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner
from grafana_api import ADMIN, EDITOR, VIEWER, FakeGrafana, grafana

from dashboards.alerts import alerts
from dashboards.boards import boards
from dashboards.command import dashboards as command
from dashboards.errors import GrafanaDenied, GrafanaError, GrafanaRejected, GrafanaUnreachable
from dashboards.everything import FOLDER_UID
from dashboards.provision import DATASOURCE_UID, Grafana

PROMETHEUS = "http://prometheus:9090"
DASHBOARDS = {board.uid for board in boards()}
RULES = {alert.name for group in alerts() for alert in group.alerts}
ITEMS = {
    f"data source {DATASOURCE_UID}",
    f"folder {FOLDER_UID}",
    *(f"dashboard {uid}" for uid in DASHBOARDS),
    *(f"alert rules {group.name}" for group in alerts()),
}


@pytest.fixture
def server():
    with grafana() as server:
        yield server


def push(server: FakeGrafana, token: str = ADMIN, **options):
    with Grafana(server.url, token) as client:
        return client.push(**{"prometheus_url": PROMETHEUS, **options})


def reach(url: str, timeout_s: float = 120.0) -> None:
    with Grafana(url, ADMIN, timeout_s=timeout_s) as client:
        client.check_access()


def test_an_empty_grafana_gets_everything(server):
    changes = push(server)
    assert set(changes.created) == ITEMS
    assert changes.updated == changes.unchanged == changes.removed == []
    assert server.folders[FOLDER_UID]["title"] == "Tailrace"
    source = server.datasources[DATASOURCE_UID]
    assert (source["type"], source["url"]) == ("prometheus", PROMETHEUS)
    assert set(server.dashboards) == DASHBOARDS
    assert {kept["folderUid"] for kept in server.dashboards.values()} == {FOLDER_UID}
    assert {rule["title"] for rule in server.rules.values()} == RULES
    assert {rule["folderUID"] for rule in server.rules.values()} == {FOLDER_UID}
    assert {rule["provenance"] for rule in server.rules.values()} == {""}, "editable in Grafana"


def test_dashboards_and_rules_read_the_data_source_that_was_chosen(server):
    push(server)
    for kept in server.dashboards.values():
        (chosen,) = [
            variable["current"]["value"]
            for variable in kept["dashboard"]["templating"]["list"]
            if variable["name"] == "datasource"
        ]
        assert chosen == DATASOURCE_UID
    for rule in server.rules.values():
        assert rule["data"][0]["datasourceUid"] == DATASOURCE_UID


def test_running_it_again_writes_nothing(server):
    push(server)
    written = len(server.writes)
    changes = push(server)
    assert set(changes.unchanged) == ITEMS
    assert changes.created == changes.updated == changes.removed == []
    assert len(server.writes) == written


def test_what_somebody_changed_is_put_back_and_the_rest_left_alone(server):
    push(server)
    server.folders[FOLDER_UID]["title"] = "Mine"
    server.datasources[DATASOURCE_UID]["url"] = "http://elsewhere"
    server.dashboards["tailrace-tail"]["dashboard"]["title"] = "Mine"
    server.rules["tailracequeueold"]["for"] = "9m"
    server.rules["tailraceburnfast"]["labels"]["team"] = "mine"
    del server.rules["tailraceblocksleaked"]
    changes = push(server)
    assert set(changes.updated) == {
        f"folder {FOLDER_UID}",
        f"data source {DATASOURCE_UID}",
        "dashboard tailrace-tail",
        "alert rules tailrace-queue-alerts",
        "alert rules tailrace-service-level-alerts",
        "alert rules tailrace-kv-alerts",
    }
    assert set(changes.unchanged) == ITEMS - set(changes.updated)
    assert server.folders[FOLDER_UID]["title"] == "Tailrace"
    assert server.datasources[DATASOURCE_UID]["url"] == PROMETHEUS
    assert server.dashboards["tailrace-tail"]["dashboard"]["version"] == 2
    assert server.rules["tailracequeueold"]["for"] == "1m"
    assert server.rules["tailraceburnfast"]["labels"] == {"severity": "page"}
    assert "tailraceblocksleaked" in server.rules
    assert push(server).updated == []


def test_a_dashboard_that_was_moved_comes_back_to_the_folder(server):
    push(server)
    server.dashboards["tailrace-pd"]["folderUid"] = ""
    assert push(server).updated == ["dashboard tailrace-pd"]
    assert server.dashboards["tailrace-pd"]["folderUid"] == FOLDER_UID


def test_alerts_that_no_longer_exist_are_removed_and_other_peoples_stay(server):
    push(server)
    old = server.rules["tailracequeueold"]
    for uid, group in (("tailraceformer", "former group"), ("somebody-elses", "theirs")):
        server.rules[uid] = {**old, "uid": uid, "title": uid, "ruleGroup": group}
        server.intervals[FOLDER_UID, group] = 60
    changes = push(server)
    assert changes.removed == ["alert rule tailraceformer"]
    assert "tailraceformer" not in server.rules
    assert "somebody-elses" in server.rules


def test_an_editor_can_do_all_but_the_data_source(server):
    with pytest.raises(GrafanaDenied, match=r"data source tailrace-prometheus.*Admin"):
        push(server, EDITOR)
    assert server.folders == {}
    push(server)
    server.dashboards.clear()
    changes = push(server, EDITOR, prometheus_url=None)
    assert len(changes.created) == len(DASHBOARDS)


def test_a_data_source_that_is_there_already_can_be_used(server):
    server.create_datasource(
        {"uid": "theirs", "name": "Theirs", "type": "prometheus", "access": "proxy", "url": "x"}
    )
    push(server, EDITOR, prometheus_url=None, datasource_uid="theirs")
    assert {rule["data"][0]["datasourceUid"] for rule in server.rules.values()} == {"theirs"}
    assert server.datasources["theirs"]["url"] == "x"


def test_without_a_data_source_it_says_how_to_get_one_and_writes_nothing(server):
    with pytest.raises(GrafanaRejected, match="no data source 'nowhere'"):
        push(server, prometheus_url=None, datasource_uid="nowhere")
    assert server.writes == []


def test_a_viewer_may_not(server):
    with pytest.raises(GrafanaDenied, match="does not allow this token"):
        push(server, VIEWER)
    assert server.writes == []


def test_a_wrong_token_is_told_as_such_before_anything_is_written(server):
    with pytest.raises(GrafanaDenied, match=r"does not know this token.*GRAFANA_TOKEN"):
        push(server, "wrong")
    assert server.log == []


def test_no_token_is_told_without_asking(server):
    with pytest.raises(GrafanaDenied, match="service account"):
        push(server, "")
    assert server.log == []


def test_a_server_that_is_down():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(GrafanaUnreachable, match=r"nothing answers at .*start Grafana"):
            reach(url)


def test_a_server_that_does_not_answer():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(GrafanaUnreachable, match="did not answer in time"):
            reach(url, 0.2)


def test_a_server_that_breaks_in_the_middle_is_a_rejection_and_the_next_run_goes_on(server):
    push(server)
    server.rules.clear()
    server.fail_with = 503
    with pytest.raises(GrafanaRejected, match="something is wrong inside") as raised:
        push(server)
    assert raised.value.status == 503
    server.fail_with = None
    assert len(push(server).created) == len(alerts())


def test_grafana_below_a_path():
    with grafana("/deep/grafana") as server:
        assert set(push(server).created) == ITEMS
        with pytest.raises(GrafanaRejected, match="Not found"):
            reach(server.url.removesuffix("/grafana"))


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://x", "http://"])
def test_a_url_that_is_none_is_told(url):
    with pytest.raises(GrafanaError, match="must be like https://"):
        Grafana(url, ADMIN)


def test_the_command_reads_the_token_from_a_file_and_tells_what_it_did(server, tmp_path):
    token = tmp_path / "token"
    token.write_text(f"{ADMIN}\n")
    arguments = ["push", "--url", server.url, "--token-file", str(token)]
    done = CliRunner().invoke(
        command, [*arguments, "--prometheus", PROMETHEUS, "--json"], env={"GRAFANA_TOKEN": None}
    )
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.output)["created"]) == ITEMS
    again = CliRunner().invoke(command, arguments, env={"GRAFANA_TOKEN": None})
    words = {line.split(maxsplit=1)[0] for line in again.output.splitlines()}
    assert (again.exit_code, words) == (0, {"unchanged"})
