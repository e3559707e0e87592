import pytest
import torch
import torch.nn.functional as F

from engine.models import linear
from engine.models.linear import Linear

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=[True, False], ids=["packed if possible", "plain"])
def packing(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_product_and_the_sum_are_those_of_float64(dtype, rows, bias):
    g = torch.Generator().manual_seed(0)
    weight = (torch.randn(24, 40, generator=g, dtype=torch.float64) / 6).to(dtype)
    b = torch.randn(24, generator=g, dtype=torch.float64).to(dtype) if bias else None
    x = torch.randn(rows, 40, generator=g, dtype=torch.float64).to(dtype)
    residual = torch.randn(rows, 24, generator=g, dtype=torch.float64).to(dtype)
    layer = Linear(weight.clone(), b)
    want = F.linear(x.double(), weight.double(), b.double() if b is not None else None)
    for got, exact in ((layer(x), want), (layer.add_to(residual, x), want + residual.double())):
        assert got.dtype == dtype
        assert (got.double() - exact).abs().max() < TOLERANCE[dtype]


@pytest.mark.skipif(not linear._can_pack(torch.bfloat16), reason="no packed bfloat16 product")
def test_the_unrounded_product_of_bfloat16_is_as_good_as_float32():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=g).to(torch.bfloat16)
    x = (4 * torch.randn(3, 40, generator=g)).to(torch.bfloat16)
    want = F.linear(x.double(), weight.double())
    layer = Linear(weight)
    got = layer.unrounded(x)
    assert got.dtype == torch.float32
    assert (layer(x).double() - want).abs().max() > 0.05
    assert (got.double() - want).abs().max() < 1e-3


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_unrounded_product_is_float32_or_wider(dtype):
    weight, x = torch.eye(5, dtype=dtype), torch.arange(5.0).to(dtype)[None]
    got = Linear(weight).unrounded(x)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    assert got.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]


def test_a_torch_without_the_packed_operators_falls_back(monkeypatch):
    class Missing:
        def __getattr__(self, name):
            raise AttributeError(name)

    linear._can_pack.cache_clear()
    monkeypatch.setattr(linear.torch.ops, "mkldnn", Missing())
    try:
        assert not linear._can_pack(torch.bfloat16)
    finally:
        linear._can_pack.cache_clear()
