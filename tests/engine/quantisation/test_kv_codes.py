"""Keys and values as codes: what rounding may cost, and what must not turn into a number."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quantisation.kv_codes import from_codes, to_codes


@settings(max_examples=80, deadline=None)
@given(
    row=st.lists(st.floats(-1e4, 1e4).filter(lambda x: x == 0 or abs(x) > 1e-30), min_size=1),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_no_number_moves_by_more_than_half_a_step(row, dtype):
    x = torch.tensor(row, dtype=dtype)
    codes, scale = to_codes(x)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert int(codes.abs().max()) <= 127
    # The step itself is rounded to float32, and the quotient to dtype.
    limit = float(scale) * (0.5 + 127 * 2.0**-23)
    assert float((from_codes(codes, scale, torch.float64) - x.double()).abs().max()) <= limit
    assert float(scale) == pytest.approx(float(x.abs().max()) / 127, rel=1e-6)


def test_the_largest_of_a_row_is_127_steps_and_ties_go_to_the_even_code():
    codes, scale = to_codes(torch.tensor([[254.0, 1.0, 3.0, 5.0, -3.0, -254.0]]))
    assert scale.tolist() == [2.0]
    assert codes.tolist() == [[127, 0, 2, 2, -2, -127]]


def test_fp8_moves_a_number_by_a_sixteenth_of_it_or_half_the_least_step():
    x = torch.cat((torch.randn(50, 64), torch.randn(50, 64) ** 9))
    codes, scales = to_codes(x, torch.float8_e4m3fn)
    assert codes.dtype == torch.float8_e4m3fn
    moved = (from_codes(codes, scales, torch.float64) - x.double()).abs()
    limit = (x.double().abs() / 16).maximum(scales.double()[:, None] * 2.0**-10)
    assert bool((moved <= limit * 1.000001).all())
    assert torch.equal(codes.float().abs().amax(-1), torch.full((100,), 448.0))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_a_row_of_zeros_stays_one(kind):
    codes, scales = to_codes(torch.zeros(2, 3, 8, dtype=torch.bfloat16), kind)
    assert scales.tolist() == [[0.0] * 3] * 2
    assert not from_codes(codes, scales, torch.float32).any()


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_does_not_turn_into_numbers_nor_touch_its_neighbours(bad, kind):
    x = torch.randn(3, 8)
    x[1, 4] = bad
    codes, scales = to_codes(x, kind)
    assert scales.isnan().tolist() == [False, True, False]
    assert from_codes(codes, scales, torch.float32).isnan().all(dim=1).tolist() == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_is_rounded_by_itself(dtype):
    x = torch.randn(7, 3, 20, dtype=torch.float64).to(dtype)
    codes, scales = to_codes(x)
    for token in range(7):
        for head in range(3):
            alone = to_codes(x[token, head])
            assert torch.equal(alone[0], codes[token, head])
            assert torch.equal(alone[1], scales[token, head])
