"""Codes with error feedback: what they gain over rounding, and in which orders."""

import itertools

import pytest
import torch

from engine.quantisation.awq import quantise_nearest
from engine.quantisation.gptq import (
    damped,
    descend,
    output_error,
    quantise_gptq,
    refit_scales,
)
from engine.quantisation.grid import Grid, cost, fit
from engine.weights.packed import even_groups

OUT, SIZE, TOKENS = 24, 192, 600


def correlated(seed=0):
    """A weight and inputs of few directions and uneven sizes, as activations are."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUT, SIZE, generator=g) / 8
    mixing = torch.randn(SIZE // 4, SIZE, generator=g)
    size = torch.exp(torch.randn(SIZE, generator=g))
    inputs = (torch.randn(TOKENS, SIZE // 4, generator=g) @ mixing) * size
    inputs += torch.randn(TOKENS, SIZE, generator=g) * size / 4
    return weight, inputs


def second_moment(inputs):
    return inputs.T @ inputs / inputs.shape[0]


@pytest.mark.parametrize("order", ["off", "static", "groups"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 96), (4, SIZE), (8, 64)])
def test_feedback_costs_the_product_less_than_rounding_does(bits, group, symmetric, order):
    weight, inputs = correlated()
    plain = second_moment(inputs)
    options = {"bits": bits, "group": group, "symmetric": symmetric}
    chosen = quantise_gptq(weight, damped(plain, 0.01), order=order, **options)
    rounded = quantise_nearest(weight, None, **options)
    assert output_error(chosen, weight, plain) < 0.5 * output_error(rounded, weight, plain)
    # By the products themselves too.
    off = (inputs @ (chosen.expand(torch.float32) - weight).T).square().sum()
    assert float(off) / TOKENS == pytest.approx(output_error(chosen, weight, plain), rel=1e-3)


@pytest.mark.parametrize("order", ["off", "static", "groups"])
def test_codes_scales_and_zeros_are_what_the_files_hold(order):
    weight, inputs = correlated(1)
    hessian = damped(second_moment(inputs), 0.01)
    m = quantise_gptq(weight, hessian, bits=4, group=32, order=order)
    assert m.codes.dtype == torch.uint8
    assert m.codes.shape == (OUT, SIZE)
    assert m.scales.shape == m.zeros.shape == (OUT, SIZE // 32)
    assert int(m.codes.max()) <= 15
    assert 1 <= int(m.zeros.min()) <= int(m.zeros.max()) <= 15
    assert torch.equal(m.scales, m.scales.half().float())
    want = (m.codes.float() - m.zeros.float()[:, m.group_of]) * m.scales[:, m.group_of]
    assert torch.equal(m.expand(torch.float32), want)
    again = quantise_gptq(weight, hessian, bits=4, group=32, order=order)
    assert torch.equal(again.codes, m.codes)


def test_only_groups_made_in_order_of_activity_are_scattered():
    weight, inputs = correlated(2)
    hessian = damped(second_moment(inputs), 0.01)
    neighbours = torch.arange(SIZE) // 32
    for order in ("off", "static"):
        m = quantise_gptq(weight, hessian, bits=4, group=32, order=order)
        assert torch.equal(m.group_of, neighbours)
    scattered = quantise_gptq(weight, hessian, bits=4, group=32, order="groups")
    most = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    assert torch.equal(scattered.group_of[most], neighbours)
    group, order = even_groups(scattered.group_of)
    assert group == 32
    # As codes, in their order, they are the same weight.
    assert torch.equal(scattered.coded().expand(torch.float32), scattered.expand(torch.float32))


def test_a_weight_that_lies_on_its_grid_is_kept():
    """Integers times a scale: feedback has nothing to hand on."""
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (OUT, SIZE), generator=g).float()
    codes[:, 0::32], codes[:, 1::32] = 0.0, 15.0
    weight = (codes - 7.0) * 0.125
    m = quantise_gptq(weight, torch.eye(SIZE), bits=4, group=32, order="off")
    assert torch.equal(m.expand(torch.float32), weight)


def test_uncorrelated_inputs_leave_nothing_to_feed_back():
    weight, _ = correlated(4)
    m = quantise_gptq(weight, torch.eye(SIZE), bits=4, group=32, order="off")
    grid = Grid(4, m.scales, m.zeros.float())
    assert torch.equal(grid.codes(weight.view(OUT, -1, 32)).view(OUT, SIZE), m.codes.float())


def test_inputs_that_never_came_are_rounded_and_do_no_harm():
    weight, inputs = correlated(5)
    inputs[:, 7] = 0.0
    plain = second_moment(inputs)
    m = quantise_gptq(weight, damped(plain, 0.01), bits=4, group=32)
    step = m.scales[:, m.group_of[7]]
    off = (m.expand(torch.float32) - weight)[:, 7].abs()
    assert torch.isfinite(m.expand(torch.float32)).all()
    assert float((off / step).median()) < 1.0


def test_refitted_scales_and_descending_codes_never_cost_more():
    weight, inputs = correlated(6)
    hessian = damped(second_moment(inputs), 0.01)
    m = quantise_gptq(weight, hessian, bits=4, group=32, order="groups")
    costs = [output_error(m, weight, hessian)]
    for _ in range(3):
        m = refit_scales(m, weight, hessian)
        costs.append(output_error(m, weight, hessian))
        m = descend(m, weight, hessian)
        costs.append(output_error(m, weight, hessian))
    assert all(b <= a * (1 + 1e-4) for a, b in itertools.pairwise(costs))
    assert costs[-1] < 0.98 * costs[0]
    assert torch.equal(m.scales, m.scales.half().float())


def test_descending_ends_where_no_single_code_can_be_better():
    weight, inputs = correlated(7)
    hessian = damped(second_moment(inputs), 0.01)
    m = quantise_gptq(weight, hessian, bits=4, group=32)
    for _ in range(40):
        before = m
        m = descend(m, weight, hessian)
        if torch.equal(m.codes, before.codes):
            break
    least = output_error(m, weight, hessian)
    for row, column in ((0, 0), (3, 77), (23, 191)):
        for step in (-1, 1):
            code = int(m.codes[row, column]) + step
            if 0 <= code <= 15:
                other = m.codes.clone()
                other[row, column] = code
                changed = type(m)(4, other, m.scales, m.zeros, m.group_of)
                assert output_error(changed, weight, hessian) >= least * (1 - 1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_grid_reaches_its_groups_ends_and_has_a_zero(bits, symmetric):
    grouped = torch.randn(50, 32, generator=torch.Generator().manual_seed(8))
    grid = fit(grouped, bits, symmetric=symmetric)
    error = (grid.nearest(grouped) - grouped).abs()
    # Half a step within, and a zero of its own is a whole number: half a step more at an end.
    assert (error <= grid.scales[:, None] * 1.05).all()
    assert torch.equal(grid.nearest(torch.zeros(50)), torch.zeros(50))
    assert torch.equal(grid.codes(grid.nearest(grouped)), grid.codes(grouped))
    if symmetric:
        assert (grid.zeros == 1 << (bits - 1)).all()


def test_a_grid_is_cut_where_that_costs_least():
    g = torch.Generator().manual_seed(9)
    grouped = torch.randn(40, 64, generator=g)
    inputs = torch.randn(300, 64, generator=g) @ torch.randn(64, 64, generator=g)
    near = second_moment(inputs)
    shrinks = (1.0, 0.9, 0.8, 0.7)
    found = fit(grouped, 4, symmetric=False, shrinks=shrinks, curvature=near)
    least = cost(found.nearest(grouped) - grouped, near)
    for shrink in shrinks:
        one = fit(grouped, 4, symmetric=False, shrinks=(shrink,))
        assert (least <= cost(one.nearest(grouped) - grouped, near) * (1 + 1e-6)).all()
    assert isinstance(found, Grid)


def test_constant_and_empty_groups_are_kept():
    grouped = torch.zeros(3, 32)
    grouped[1] = 0.5
    grouped[2] = -0.25
    for symmetric in (False, True):
        grid = fit(grouped, 4, symmetric=symmetric)
        assert torch.allclose(grid.nearest(grouped), grouped, rtol=0.08)
