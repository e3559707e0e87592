"""The GPU backends over the engine's pool, their kernels replaced by twins; Triton interpreted."""

import pytest
import torch
from attention import Paged, attend_over_pool, filled_pool, make_step

from engine.attention import flash, flash_twin
from engine.attention.flash import MAX_QUERIES, FlashAttention, FlashCalls
from engine.attention.varlen import VarlenAttention
from engine.errors import ConfigError
from engine.execution.pool import KVPool
from engine.models.model import KVLayout

DIM = 16
STEPS = [
    ((1, 7, 9, 1), (12, 7, 21, 300)),
    ((1, 1, 1), (5, 17, 33)),
    ((4, 4), (9, 40)),
    ((20, 20), (20, 35)),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Recorded:
    """Counts calls of each kernel and lets them through."""

    def __init__(self):
        self.calls = []

    def varlen(self, *args, **kwargs):
        self.calls.append("varlen")
        return flash_twin.flash_attn_varlen_func(*args, **kwargs)

    def with_kvcache(self, *args, **kwargs):
        self.calls.append("kvcache")
        return flash_twin.flash_attn_with_kvcache(*args, **kwargs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("q_lens", "k_lens"), STEPS)
def test_flash_computes_the_definition_with_the_call_made_for_the_step(q_lens, k_lens, window):
    recorded = Recorded()
    backend = FlashAttention(FlashCalls(recorded.varlen, recorded.with_kvcache), window=window)
    got, want = attend_over_pool(
        backend, q_lens, k_lens, page=256, window=window, dtype=torch.float64
    )
    assert (got - want).abs().max() < 1e-12
    uniform = len(set(q_lens)) == 1 and q_lens[0] <= MAX_QUERIES
    assert recorded.calls == ["kvcache" if uniform else "varlen"]


@pytest.mark.parametrize("page", [16, 256], ids=["gathered", "paged"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("q_lens", "k_lens"), STEPS)
def test_torchs_varlen_computes_the_definition(q_lens, k_lens, window, page):
    backend = VarlenAttention(flash_twin.varlen_attn, window=window)
    got, want = attend_over_pool(
        backend, q_lens, k_lens, page=page, window=window, dtype=torch.float64
    )
    assert (got - want).abs().max() < 1e-12


def test_another_step_in_the_same_context_object_is_seen_at_layer_0():
    """A graph's inputs are one object whose contents change."""
    recorded = Recorded()
    backend = FlashAttention(FlashCalls(recorded.varlen, recorded.with_kvcache))
    data = Paged((5, 9), 256, 2, torch.float64, dim=DIM)
    pool = filled_pool(data, 256, torch.float64, layer=0)
    step = make_step((1, 1), (5, 9), data.table, 256)
    one = torch.randn(2, 2, DIM, dtype=torch.float64)
    q = torch.randn(2, 4, DIM, dtype=torch.float64)
    backend.attend(q, one, one, 0, pool, step)
    block = int(data.table[0, 0])
    step.slots.copy_(torch.tensor([block * 256 + 5, int(data.table[1, 0]) * 256 + 9]))
    step.kv_lens.copy_(torch.tensor([6, 10]))
    backend.attend(q, one * 2, one, 0, pool, step)
    assert torch.equal(pool.keys(0)[block, 4], one[0]), "the first step's token"
    assert torch.equal(pool.keys(0)[block, 5], 2 * one[0]), "the second step's"


def test_flash_says_why_it_is_not_there(monkeypatch):
    monkeypatch.setattr(flash, "version", lambda name: "2.8.4")
    with pytest.raises(ConfigError, match=r"flash-attn 2\.8\.4 is installed, only 2\.8\.3"):
        flash.flash_calls()
    monkeypatch.setattr(flash, "version", lambda name: "2.8.3.post1")
    assert "cannot be imported" in (flash.flash_unavailable() or "cannot be imported")


@pytest.mark.parametrize("page", [16, 256], ids=["gathered", "paged"])
def test_torchs_own_kernel_takes_the_arguments_that_the_backend_gives_it(page):
    """Shapes only: tensors without memory."""
    from torch.nn.attention.varlen import varlen_attn

    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", fingerprint="")
    table = torch.zeros(2, 1 + 300 // page, dtype=torch.int32)
    step = make_step((1, 5), (20, 300), table, page)
    pool = KVPool(layout, 8, page, "meta")
    for name in ("slots", "cu_q", "kv_lens", "block_table", "last"):
        setattr(step, name, getattr(step, name).to("meta"))
    q = torch.empty(6, 4, 64, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(6, 2, 64, dtype=torch.bfloat16, device="meta")
    out = VarlenAttention(varlen_attn).attend(q, kv, kv, 0, pool, step)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
