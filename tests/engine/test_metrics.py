import subprocess
import sys

import pytest

from engine import metrics
from engine.metrics import CATALOGUE, Metric

VLLM_TTFT = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
]
VLLM_ITL = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
]
VLLM_E2E = [
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    *(960, 1920, 7680),
]


def metric(**fields) -> Metric:
    values = {"name": "a", "kind": "gauge", "unit": "", "labels": (), "help": "h"}
    return Metric(**{**values, **fields})


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("vllm:time_to_first_token_seconds", VLLM_TTFT),
        ("tailrace_request_ttft_seconds", VLLM_TTFT),
        ("vllm:inter_token_latency_seconds", VLLM_ITL),
        ("tailrace_request_itl_seconds", VLLM_ITL),
        ("vllm:e2e_request_latency_seconds", VLLM_E2E),
        ("tailrace_request_phase_seconds", VLLM_E2E),
    ],
)
def test_every_boundary_of_vllm_is_one_of_ours_so_quantiles_compare(name, theirs):
    assert set(theirs) <= set(CATALOGUE[name].buckets)


def test_the_queue_histogram_resolves_waits_far_below_300_ms():
    assert sum(bound < 0.3 for bound in CATALOGUE["tailrace_request_phase_seconds"].buckets) >= 8


def test_token_boundaries_run_1_2_5_in_whole_numbers():
    assert metrics.TOKEN_BUCKETS[:6] == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    assert all(bound == int(bound) for bound in metrics.TOKEN_BUCKETS)


def test_names_carry_their_unit():
    for m in CATALOGUE.values():
        if m.name.startswith("tailrace_") and m.unit in ("seconds", "bytes", "blocks", "tokens"):
            assert m.unit in m.name, m.name
        assert m.help.endswith("."), m.name


def test_only_vllm_names_hold_a_colon():
    assert {m.name.split(":")[0] for m in CATALOGUE.values() if ":" in m.name} == {"vllm"}
    assert all(m.name.startswith(("vllm:", "tailrace_")) for m in CATALOGUE.values())


def test_names_stay_distinct_where_colons_are_not_allowed():
    assert len({name.replace(":", "_") for name in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "1a"},
        {"name": "a-b"},
        {"labels": ("a:b",)},
        {"labels": ("replica",)},
        {"labels": ("le",)},
        {"labels": ("x", "x")},
        {"kind": "counter"},
        {"kind": "histogram"},
        {"kind": "histogram", "buckets": (2.0, 1.0)},
        {"kind": "histogram", "buckets": (1.0, 1.0)},
        {"buckets": (1.0,)},
    ],
    ids=str,
)
def test_a_declaration_prometheus_could_not_hold_is_refused(fields):
    with pytest.raises(AssertionError):
        metric(**fields)


def test_the_catalogue_needs_neither_torch_nor_ray_nor_prometheus():
    script = (
        "import sys, engine.metrics;"
        "bad = {'torch', 'ray', 'prometheus_client', 'numpy'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
