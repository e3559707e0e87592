import pytest

from cluster.bench.batching import (
    MACHINES,
    MIXES,
    Effort,
    Latencies,
    Mix,
    Prices,
    arrivals_of,
    bench_batching,
    serve,
    table,
)

MIX = Mix(prompt_tokens=200, output_tokens=20, ttft_s=1.0, itl_s=0.05)
PRICES = Prices(step_s=0.01, row_s=0.001, prompt_token_s=0.0005, read_s=0.0, noise=0.0)


def test_a_lone_request_takes_what_its_steps_cost():
    (arrival,) = arrivals_of(MIX, 1.0, Effort(requests=1))
    found = serve([arrival], MIX, PRICES, 512, seed=1)
    assert found.ttft_p95_s == pytest.approx(0.01 + 0.0005 * arrival.prompt_tokens)
    assert found.itl_p95_s == pytest.approx(0.011)


def test_a_fixed_budget_trades_one_target_for_the_other():
    arrivals = arrivals_of(MIX, 0.6 * MIX.capacity(PRICES), Effort(requests=80))
    small, large = (serve(arrivals, MIX, PRICES, budget, seed=1) for budget in (32, 512))
    assert small.itl_p95_s < large.itl_p95_s
    assert small.ttft_p95_s > large.ttft_p95_s


def test_both_targets_must_be_kept():
    assert Latencies(1.0, 0.05).attains(MIX)
    assert not Latencies(1.01, 0.05).attains(MIX)
    assert not Latencies(1.0, 0.051).attains(MIX)


def test_lengths_lie_between_half_and_twice_the_middle_and_depend_on_the_seed_alone():
    arrivals = arrivals_of(MIX, 5.0, Effort(requests=200))
    assert len(arrivals) == 200
    assert all(100 <= a.prompt_tokens <= 400 and 10 <= a.output_tokens <= 40 for a in arrivals)
    assert arrivals == arrivals_of(MIX, 5.0, Effort(requests=200))
    assert arrivals != arrivals_of(MIX, 5.0, Effort(requests=200, seed=2))


def test_every_case_has_its_row_and_the_counts_are_of_those_that_attain():
    result = bench_batching(Effort(requests=20, loads=(0.2,)), lambda line: None)
    assert result["num_loads"] == len(MIXES) == len(result["cases"])
    kept = [case["loads"][0]["slo"]["attains"] for case in result["cases"]]
    assert result["slo_attained"] == sum(kept)
    assert {case["machine"] for case in result["cases"]} == set(MACHINES)
    assert result["step_costs"] == "stated"
    lines = table(result)
    assert lines[0].startswith("simulated: the scheduler is the engine's, what a step takes is sta")
    price = "a step: 8 ms, 0.8 ms a stream, 0.4 ms a prompt token, 0.02 us a KV token read"
    assert lines.count(price) == sum(machine == "laptop" for machine, _ in MIXES)
    assert lines[-1].startswith(f"loads attained of {len(MIXES)}: slo ")
