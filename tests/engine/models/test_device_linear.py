"""Products of a GPU's decoder, by what a CPU can tell of them."""

import os

import pytest
import torch

from engine.attention.capabilities import Device
from engine.models.device_linear import (
    FP8_MAX,
    DenseLinear,
    DeviceProducts,
    Fp8Linear,
    coded_linear,
    fp8_fits,
    to_fp8,
    weights_unavailable,
)
from engine.quantisation.codes import CodedMatrix
from engine.quantisation.rounding import round_to_codes

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

needs_triton = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("triton") is None,
    reason="Triton is not installed: pip install triton",
)

H100 = Device(kind="cuda", compute=(9, 0), missing={}, name="H100")
A100 = Device(kind="cuda", compute=(8, 0), missing={"triton": "not installed"}, name="A100")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_products_are_products(dtype, biased):
    weight, x = torch.randn(24, 32).to(dtype), torch.randn(5, 32).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    residual = torch.randn(5, 24).to(dtype)
    linear = DenseLinear(weight, bias)
    want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    worst = 0.2 if dtype == torch.bfloat16 else 1e-5
    assert (linear(x).double() - want).abs().max() < worst
    assert (linear.add_to(residual, x).double() - residual.double() - want).abs().max() < worst
    wide = linear.unrounded(x)
    assert wide.dtype == torch.float32
    assert (wide.double() - want).abs().max() < 1e-4


def test_fp8_rows_use_the_whole_range_of_the_type():
    x = torch.randn(7, 64) * torch.logspace(-3, 3, 7)[:, None]
    x[3] = 0
    codes, scale = to_fp8(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (7, 1)
    tops = codes.float().abs().amax(dim=1)
    assert tops[3] == 0
    assert (tops[[0, 1, 2, 4, 5, 6]] == FP8_MAX).all()
    error = (codes.float() * scale - x).abs()
    assert (error <= x.abs() / 16 + scale * 2**-9).all(), "e4m3 keeps three bits of mantissa"


def test_fp8_products_follow_the_rounded_operands():
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    linear = Fp8Linear(weight, torch.ones(32).bfloat16())
    a, a_scale = to_fp8(x)
    b, b_scale = to_fp8(weight)
    want = (a.double() * a_scale) @ (b.double() * b_scale).t() + 1
    assert (linear(x).double() - want).abs().max() < want.abs().max() / 100
    plain = x.double() @ weight.double().t() + 1
    assert (linear(x).double() - plain).pow(2).mean().sqrt() < plain.std() * 0.06


def test_matrices_that_fp8_does_not_take_stay_dense():
    assert fp8_fits(32, 64)
    assert not fp8_fits(24, 64)
    products = DeviceProducts({}, device=DEVICE, dtype=torch.bfloat16, fp8=True)
    assert isinstance(products.dense(torch.randn(24, 64).bfloat16(), None), DenseLinear)
    assert isinstance(products.dense(torch.randn(32, 64).bfloat16(), None), Fp8Linear)
    assert isinstance(products.head(torch.randn(32, 64).bfloat16()), DenseLinear)
    assert (products.num_coded, products.num_dense) == (1, 1)


@pytest.mark.parametrize(
    ("device", "quantisation", "reason"),
    [
        (H100, "fp8", None),
        (H100, "int4", None),
        (A100, "fp8", "need compute capability 8.9, A100 has 8.0"),
        (A100, "int8", "needs Triton (not installed)"),
        (A100, "none", None),
        (Device(kind="cuda", compute=(7, 5), missing={}), "none", "7.5 is below 8.0"),
    ],
)
def test_what_a_device_cannot_multiply_is_said(device, quantisation, reason):
    found = weights_unavailable(device, quantisation)
    assert found is None if reason is None else reason in (found or "")


def matrix(bits, group, *, minimums, ordered, out=40, size=160):
    rounded = round_to_codes(torch.randn(out, size), bits, group)
    made = rounded.with_minimums() if minimums else rounded
    order = torch.randperm(size).int() if ordered else None
    return CodedMatrix(
        bits=made.bits,
        group=made.group,
        codes=made.codes,
        scales=made.scales,
        minimums=made.minimums,
        order=order,
    )


@needs_triton
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_coded_products_are_those_of_the_weight_they_stand_for(bits, group, ordered, rows):
    for minimums in (True, False) if bits == 8 else (True,):
        coded = matrix(bits, group, minimums=minimums, ordered=ordered)
        bias = torch.randn(40)
        linear = coded_linear(coded, bias, device=DEVICE, dtype=torch.float32)
        x, residual = torch.randn(rows, 160), torch.randn(rows, 40)
        want = x.double() @ coded.expand(torch.float64).t() + bias
        got = linear(x.to(DEVICE)).cpu()
        assert (got.double() - want).abs().max() < 2e-4
        summed = linear.add_to(residual.to(DEVICE), x.to(DEVICE)).cpu()
        assert (summed.double() - residual - want).abs().max() < 2e-4


@needs_triton
def test_a_last_group_may_be_short_and_a_weight_takes_half_a_byte_an_input():
    from engine.models.triton_linear import CodedLinear

    coded = matrix(4, 128, minimums=True, ordered=False, size=144)
    linear = CodedLinear(coded, None, device=DEVICE, dtype=torch.float32)
    x = torch.randn(2, 144)
    want = x.double() @ coded.expand(torch.float64).t()
    assert (linear(x.to(DEVICE)).cpu().double() - want).abs().max() < 2e-4
    assert linear.num_bytes == 40 * 144 // 2 + 2 * 40 * 2 * 4
    assert torch.allclose(linear.expand().cpu(), coded.expand(torch.float32), atol=1e-5)


@needs_triton
def test_matrices_of_one_input_are_one_product_and_unlike_ones_stay_apart():
    q = matrix(4, 64, minimums=True, ordered=False)
    k = matrix(8, 32, minimums=False, ordered=False, out=16)
    moved = matrix(4, 64, minimums=True, ordered=True)
    products = DeviceProducts({"q": q, "k": k, "moved": moved}, device=DEVICE, dtype=torch.float32)
    linear = products.coded(["q", "k"], None)
    assert linear is not None
    x = torch.randn(3, 160)
    want = torch.cat([x.double() @ m.expand(torch.float64).t() for m in (q, k)], dim=1)
    assert (linear(x.to(DEVICE)).cpu().double() - want).abs().max() < 2e-4
    assert products.coded(["q", "moved"], None) is None
    assert products.coded(["q", "v"], None) is None
