from __future__ import annotations

from cluster.bench.ranks import BATCHES, bench_ranks, table


def test_steps_over_ranks_are_priced_beside_steps_of_this_process():
    said: list[str] = []
    result = bench_ranks(ranks=2, steps=20, say=said.append)
    assert (result["ranks"], result["steps"]) == (2, 20)
    assert list(result["batches"]) == [str(batch) for batch in BATCHES]
    for found in result["batches"].values():
        step, alone = found["step_ms"], found["in_process_ms"]
        assert step["count"] == alone["count"] == 20
        assert abs(found["added_ms"] - (step["p50"] - alone["p50"])) < 0.001 * step["p50"]
        assert 0 < found["added_ms"] < step["p50"]
    assert len(table(result)) == 1 + len(BATCHES)
    assert said[0] == "starting 2 ranks"
