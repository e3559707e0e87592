"""Every alert in promtool: fires on what it is for, with its texts, and is quiet otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import promtool

from dashboards.alerts import alerts
from dashboards.export import rule_files
from dashboards.rules import Alert

RUNBOOK = "https://runbook"
ALERTS = {alert.name: alert for group in alerts() for alert in group.alerts}
ROOT = Path(__file__).resolve().parents[2]

JM = 'job="j", model="m"'
HEALTHY = {
    'tailrace_build_info{job="j", role="gateway", version="1", replica="g"}': "1x300",
    'tailrace_slo_objective_ratio{job="j", tier="default", replica="g"}': "0.99x300",
    'tailrace_slo_target_seconds{job="j", tier="default", slo="queue", replica="g"}': "2x300",
    f'tailrace_slo_requests_total{{{JM}, tier="default", slo="ttft", met="true"}}': "0+1000x300",
    f'tailrace_slo_requests_total{{{JM}, tier="default", slo="ttft", met="false"}}': "0+1x300",
    f'tailrace_replicas_up{{{JM}, role="decode", replica="g"}}': "2x300",
    f'tailrace_stale_endpoints{{{JM}, role="decode", replica="g"}}': "0x300",
    f'tailrace_request_phase_seconds_sum{{{JM}, tier="default", phase="queue"}}': "0+1x300",
    f'tailrace_request_phase_seconds_sum{{{JM}, tier="default", phase="stream"}}': "0+9x300",
    f'tailrace_request_duration_seconds_sum{{{JM}, tier="default"}}': "0+10x300",
    f'tailrace_queue_oldest_age_seconds{{{JM}, tier="default", replica="q"}}': "1x300",
    f'tailrace_queue_connected{{{JM}, replica="g"}}': "1x300",
    f'tailrace_kv_leases_expired_total{{{JM}, replica="p"}}': "7x300",
    f'tailrace_kv_leaked_blocks{{{JM}, replica="p"}}': "0x300",
    f'tailrace_prefill_fallbacks_total{{{JM}, action="local", replica="d"}}': "0+1x300",
    f'tailrace_pd_decisions_total{{{JM}, decision="disaggregated", reason="none", replica="d"}}': (
        "0+100x300"
    ),
    f'tailrace_pd_decisions_total{{{JM}, decision="local", reason="short", replica="d"}}': (
        "0+500x300"
    ),
    f'tailrace_kv_checksum_mismatches_total{{{JM}, replica="d"}}': "3x300",
    f'tailrace_gpu_up{{{JM}, role="decode", gpu="0", uuid="u", replica="d"}}': "1x300",
    f'tailrace_gpu_ecc_errors_total{{{JM}, gpu="0", uuid="u", kind="corrected"}}': "0+1x300",
    f'tailrace_gpu_ecc_errors_total{{{JM}, gpu="0", uuid="u", kind="uncorrected"}}': "0x300",
    f'tailrace_gpu_throttled{{{JM}, gpu="0", uuid="u", reason="idle"}}': "1x300",
    f'tailrace_gpu_throttled{{{JM}, gpu="0", uuid="u", reason="thermal_hardware"}}': "0x300",
}
"""One sample a minute for five hours."""


@dataclass(frozen=True)
class Fires:
    """Instead of the healthy series these, and the alert fires at `at` with `labels`."""

    series: dict[str, str]
    at: str
    labels: dict[str, str]
    value: str = ""
    """As its texts show it."""


def _judged(met: str) -> str:
    return f'tailrace_slo_requests_total{{{JM}, tier="default", slo="ttft", met="{met}"}}'


def _misses(percent: int) -> dict[str, str]:
    return {_judged("false"): f"0+{percent}x300", _judged("true"): f"0+{100 - percent}x300"}


_ECC = f'tailrace_gpu_ecc_errors_total{{{JM}, gpu="0", uuid="u", kind="uncorrected"}}'
_BURN = {"job": "j", "model": "m", "tier": "default", "slo": "ttft"}
_JM = {"job": "j", "model": "m"}
_GPU = {"gpu": "0", "uuid": "u"}

FIRES = {
    "TailraceBurnFast": Fires(_misses(15), "10m", _BURN),
    "TailraceBurnSlow": Fires(_misses(7), "30m", _BURN),
    "TailraceBurnDay": Fires(_misses(4), "2h", _BURN),
    "TailraceBurnThreeDays": Fires(_misses(2), "4h", _BURN),
    "TailraceNoFigures": Fires(
        {'tailrace_build_info{job="j", role="gateway", version="1", replica="g"}': "1x5"},
        *("15m", {"role": "gateway"}),
    ),
    "TailraceReplicaDown": Fires(
        {f'tailrace_replicas_up{{{JM}, role="decode", replica="g"}}': "2x20 1x60"},
        *("25m", {**_JM, "role": "decode"}, "1"),
    ),
    "TailraceStaleEndpoints": Fires(
        {f'tailrace_stale_endpoints{{{JM}, role="decode", replica="g"}}': "0x5 1x60"},
        *("10m", {**_JM, "role": "decode"}, "1"),
    ),
    "TailracePhaseSumOff": Fires(
        {f'tailrace_request_phase_seconds_sum{{{JM}, tier="default", phase="queue"}}': "0x300"},
        *("30m", _JM),
    ),
    "TailraceQueueOld": Fires(
        {f'tailrace_queue_oldest_age_seconds{{{JM}, tier="default", replica="q"}}': "5x300"},
        *("5m", {**_JM, "tier": "default"}, "2.5"),
    ),
    "TailraceQueueAway": Fires(
        {f'tailrace_queue_connected{{{JM}, replica="g"}}': "1x5 0x60"}, "10m", _JM
    ),
    "TailraceLeasesExpired": Fires(
        {f'tailrace_kv_leases_expired_total{{{JM}, replica="p"}}': "7+1x300"}, "20m", _JM
    ),
    "TailraceBlocksLeaked": Fires(
        {f'tailrace_kv_leaked_blocks{{{JM}, replica="p"}}': "0x5 8x60"},
        *("10m", {**_JM, "replica": "p"}, "8"),
    ),
    "TailraceKVFallbacks": Fires(
        {f'tailrace_prefill_fallbacks_total{{{JM}, action="local", replica="d"}}': "0+10x300"},
        *("20m", _JM, "10%"),
    ),
    "TailraceKVCorrupt": Fires(
        {f'tailrace_kv_checksum_mismatches_total{{{JM}, replica="d"}}': "3x5 4x60"}, "7m", _JM
    ),
    "TailraceGpuLost": Fires(
        {f'tailrace_gpu_up{{{JM}, role="decode", gpu="0", uuid="u", replica="d"}}': "1x5 0x60"},
        *("10m", {**_JM, **_GPU, "role": "decode", "replica": "d"}),
    ),
    "TailraceGpuMemoryErrors": Fires(
        {_ECC: "0x5 1x9"},
        *("8m", {**_JM, **_GPU}),
    ),
    "TailraceGpuThrottled": Fires(
        {f'tailrace_gpu_throttled{{{JM}, gpu="0", uuid="u", reason="thermal_hardware"}}': "1x300"},
        *("20m", {**_JM, **_GPU, "reason": "thermal_hardware"}),
    ),
}


def rendered(text: str, labels: dict[str, str], value: str) -> str:
    """What Prometheus makes of a text with placeholders."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", value, text)


def expected(alert: Alert, case: Fires) -> dict[str, Any]:
    annotations = {**alert.annotations(RUNBOOK), "dashboard": alert.dashboard}
    return {
        "exp_labels": {**case.labels, "severity": alert.severity},
        "exp_annotations": {
            name: rendered(text, case.labels, case.value) for name, text in annotations.items()
        },
    }


def run_promtool(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    for name, text in rule_files(RUNBOOK).items():
        (tmp_path / name).write_text(text)
    file = tmp_path / "test.yaml"
    files = ["tailrace.rules.yaml", "tailrace.alerts.yaml"]
    file.write_text(
        yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": tests})
    )
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout[-4000:]


def scenario(series: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    values = [{"series": name, "values": text} for name, text in {**HEALTHY, **series}.items()]
    return {"interval": "1m", "input_series": values, "alert_rule_test": checks}


def quiet(name: str, at: str) -> dict[str, Any]:
    return {"eval_time": at, "alertname": name, "exp_alerts": []}


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert set(FIRES) == set(ALERTS)


def test_no_alert_fires_on_a_healthy_cluster(tmp_path: Path) -> None:
    checks = [quiet(name, at) for name in ALERTS for at in ("10m", "1h", "4h")]
    run_promtool(tmp_path, [scenario({}, checks)])


def test_each_alert_fires_with_its_texts_filled_in(tmp_path: Path) -> None:
    tests = [
        scenario(
            case.series,
            [
                {
                    "eval_time": case.at,
                    "alertname": name,
                    "exp_alerts": [expected(ALERTS[name], case)],
                }
            ],
        )
        for name, case in FIRES.items()
    ]
    run_promtool(tmp_path, tests)


def test_a_burn_that_is_over_stops_paging_while_the_hour_is_still_bad(tmp_path: Path) -> None:
    over = {_judged("false"): "0+15x30 450x60", _judged("true"): "0+85x90"}
    test = scenario(over, [quiet("TailraceBurnFast", "45m")])
    test["promql_expr_test"] = [
        {
            "expr": f"{name} > bool 14.4",
            "eval_time": "40m",
            "exp_samples": [
                {"labels": '{job="j", model="m", slo="ttft", tier="default"}', "value": v}
            ],
        }
        for name, v in (("tailrace:slo_burn:rate5m", 0), ("tailrace:slo_burn:rate30m", 0))
    ]
    run_promtool(tmp_path, [test])


def test_a_short_spike_does_not_page(tmp_path: Path) -> None:
    spike = {_judged("false"): "0+0x200 0+50x2 100x98", _judged("true"): "0+1000x300"}
    checks = [quiet("TailraceBurnFast", at) for at in ("3h20m", "3h22m", "3h25m", "3h30m")]
    run_promtool(tmp_path, [scenario(spike, checks)])


def test_every_target_takes_its_own_share_of_the_budget(tmp_path: Path) -> None:
    series = {
        **_misses(3),
        _judged("false").replace("ttft", "itl"): "0+1x300",
        _judged("true").replace("ttft", "itl"): "0+199x300",
    }
    test = scenario(series, [])
    del test["alert_rule_test"]
    labels = '{{job="j", model="m", slo="{}", tier="default"}}'
    test["promql_expr_test"] = [
        {
            "expr": "round(tailrace:slo_burn:rate30m, 0.001)",
            "eval_time": "1h",
            "exp_samples": [
                {"labels": labels.format("itl"), "value": 0.5},
                {"labels": labels.format("ttft"), "value": 3},
            ],
        }
    ]
    run_promtool(tmp_path, [test])


def test_the_rule_files_are_valid(tmp_path: Path) -> None:
    for name, text in rule_files().items():
        (tmp_path / name).write_text(text)
        done = promtool("check", "rules", str(tmp_path / name))
        assert done.returncode == 0, done.stdout


def test_every_alert_has_its_entry_in_the_runbook_and_the_runbook_no_other() -> None:
    text = (ROOT / "docs/runbook.md").read_text()
    entries = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert entries == list(ALERTS)
    for alert in ALERTS.values():
        base, _, anchor = alert.annotations("docs/runbook.md")["runbook_url"].partition("#")
        assert (ROOT / base).is_file()
        # GitHub's anchors: lower case, spaces to dashes, punctuation dropped.
        assert anchor in {re.sub(r"[^\w -]", "", e).lower().replace(" ", "-") for e in entries}
    for target in re.findall(r"\]\(#([^)]+)\)", text):
        assert target in {name.lower() for name in ALERTS}


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert.severity in ("page", "ticket")
    assert alert.description.count(".") >= 1
    assert len(alert.description) > 60
    placeholders = re.findall(r"\$labels\.(\w+)", alert.summary + alert.description)
    assert set(placeholders) <= set(FIRES[name].labels)
