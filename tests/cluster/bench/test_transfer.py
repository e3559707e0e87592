import pytest

pytest.importorskip("nixl_cu12", reason="install the extra: pip install 'tailrace[nixl]'")

from cluster.bench.transfer import Effort, bench_transfer, table


def test_a_short_run_moves_the_same_bytes_both_ways():
    said = []
    # A pull that goes by the wrong way, or a byte that differs, is an error.
    result = bench_transfer(Effort(pairs=10, num_tokens=40), said.append)
    assert said == ["10 pairs of 10"]
    assert result["bytes"] == 40 * 2 * 30 * 3 * 64 * 2
    assert result["link_ms"]["count"] == result["nixl_ms"]["count"] == 10
    assert 0 < result["ratio_p25"] <= result["ratio"] <= result["ratio_p75"]
    assert table(result)[0] == "40 tokens, 0.9 MB, 10 pairs:"
