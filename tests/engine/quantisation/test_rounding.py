"""Rounding weights to codes at load."""

import pytest
import torch

from engine.quantisation.rounding import round_to_codes


def weights(out=64, size=300, seed=0):
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("size", [1, 31, 32, 300, 576])
def test_no_weight_is_off_by_more_than_half_a_step_of_its_group(group, size):
    weight = weights(size=size)
    m = round_to_codes(weight, 8, group)
    step = m.scales.repeat_interleave(group, dim=1)[:, :size]
    error = (m.expand(torch.float32) - weight).abs()
    # The scale is rounded to float16, by which the largest weights are off too.
    assert (error <= step * (0.5 + 127 * 2**-11)).all()
    assert m.codes.min() >= 1
    assert torch.equal(m.scales, m.scales.half().float())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_lose_less_than_the_whole_range_in_equal_steps_would(group):
    weight = weights(size=256)
    m = round_to_codes(weight, 4, group)
    grouped = weight.view(64, -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = (((grouped - low) / step).round() * step + low - grouped).square().mean()
    error = (m.expand(torch.float32) - weight).square().mean()
    assert error < plain
    assert error.sqrt() / weight.square().mean().sqrt() < {32: 0.08, 64: 0.09, 128: 0.11}[group]


def test_smaller_groups_and_more_bits_lose_less():
    weight = weights(size=256)
    errors = [
        float((round_to_codes(weight, bits, group).expand(torch.float32) - weight).norm())
        for bits, group in ((8, 32), (8, 128), (4, 32), (4, 64), (4, 128))
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_tiny_and_huge_groups_survive(bits):
    weight = torch.zeros(4, 64)
    weight[1] = 0.75
    weight[2] = 1e-12
    weight[3, 5] = -1e4
    got = round_to_codes(weight, bits, 32).expand(torch.float32)
    assert torch.isfinite(got).all()
    assert (got[0] == 0).all()
    assert (got[1] - 0.75).abs().max() < 0.01
    assert got[2].abs().max() < 1e-6
    assert abs(float(got[3, 5]) + 1e4) < 10 if bits == 8 else abs(float(got[3, 5]) + 1e4) < 2e3
