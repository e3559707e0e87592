from __future__ import annotations

from cluster.bench.metrics import Pair, summary, table, with_metrics


def pair(off: float, on: float) -> Pair:
    """CPU seconds of the gateway; the rest is the same on both sides."""
    same = {"decode": 0.4, "haproxy": 0.1, "all": 9.0, "client": 3.0}
    return Pair(off={"gateway": off, **same}, on={"gateway": on, **same}, num_tokens=2000)


def test_the_ratio_is_the_median_of_pairs_of_what_is_ours_alone():
    # Neither Ray's processes nor the client's are in it.
    assert pair(0.5, 0.6).ratio == 1.1
    result = summary([pair(0.5, 0.5), pair(0.5, 0.52), pair(0.5, 0.6)])
    assert result["metrics_cpu_ratio"] == 1.02
    assert result["interval"] == [1.0, 1.1]
    assert result["ratios"] == [1.0, 1.02, 1.1]
    cost = result["cpu_s_per_1000_tokens"]
    assert (cost["off"]["gateway"], cost["on"]["gateway"]) == (0.25, 0.26)
    assert (cost["off"]["client"], cost["on"]["all"]) == (1.5, 4.5)


def test_the_table_shows_both_sides_and_what_others_took():
    result = {**summary([pair(0.5, 0.52)] * 2), "others_cpu_share": 0.031}
    lines = table(result)
    assert lines[0].startswith("CPU with metrics, without = 1: 1.02 (1.02 to 1.02), 2 pairs")
    assert "  gateway                     0.25      0.26" in lines
    assert lines[-1] == "others took 3.1 % of the machine"


def test_metrics_are_switched_in_every_deployment_and_nothing_else_changes():
    data = {
        "applications": [
            {
                "import_path": "deployments.app:gateway",
                "deployments": [{"name": "Gateway", "user_config": {"revision": 1}}],
            },
            {
                "import_path": "deployments.app:model",
                "args": {"name": "m"},
                "deployments": [{"name": "Decode"}, {"name": "Prefill", "user_config": None}],
            },
            {"import_path": "somebody:else", "deployments": [{"name": "Theirs"}]},
        ]
    }
    gateway, model, other = with_metrics(data, False)["applications"]
    assert gateway["deployments"][0]["user_config"] == {"revision": 1, "metrics": False}
    assert [each["user_config"] for each in model["deployments"]] == [{"metrics": False}] * 2
    assert model["args"] == {"name": "m"}
    assert other == data["applications"][2]
    assert data["applications"][0]["deployments"][0]["user_config"] == {"revision": 1}
