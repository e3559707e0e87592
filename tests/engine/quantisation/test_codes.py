"""What a matrix of codes stands for, and the forms that stand for the same."""

import pytest
import torch

from engine.quantisation.codes import CodedMatrix, alike


def coded(out=3, size=70, *, bits=4, group=32, minimums=False, order=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = -(-size // group)
    return CodedMatrix(
        bits=bits,
        group=group,
        codes=torch.randint(0, 1 << bits, (out, size), generator=g, dtype=torch.uint8),
        scales=torch.randn(out, groups, generator=g).half().float(),
        minimums=torch.randn(out, groups, generator=g).half().float() if minimums else None,
        order=order,
    )


def by_definition(m):
    out, size = m.codes.shape
    weight = torch.zeros(out, size, dtype=torch.float64)
    for o in range(out):
        for k in range(size):
            scale = float(m.scales[o, k // m.group])
            code = int(m.codes[o, k])
            at = k if m.order is None else int(m.order[k])
            if m.minimums is None:
                weight[o, at] = scale * (code - (8 if m.bits == 4 else 128))
            else:
                weight[o, at] = scale * code + float(m.minimums[o, k // m.group])
    return weight


FORMS = [
    {},
    {"bits": 8},
    {"minimums": True, "group": 64},
    {"bits": 8, "minimums": True, "group": 128, "size": 300},
    {"order": torch.randperm(70).int()},
]


@pytest.mark.parametrize("form", FORMS)
def test_expanding_is_the_definition(form):
    m = coded(**form)
    want = by_definition(m)
    assert torch.equal(m.expand(torch.float64), want)
    assert torch.allclose(m.expand(torch.float32).double(), want, rtol=1e-6, atol=1e-7)
    assert m.expand(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_minimums_and_smaller_groups_change_no_weight(form):
    m = coded(**form)
    assert torch.equal(m.with_minimums().expand(torch.float64), m.expand(torch.float64))
    assert torch.equal(m.with_group(32).expand(torch.float64), m.expand(torch.float64))


def test_parts_of_one_product_get_one_form_without_loss():
    parts = [coded(), coded(bits=8, group=64, seed=1), coded(minimums=True, seed=2)]
    same = alike(parts)
    assert {(m.bits, m.group, m.minimums is None) for m in same} == {(8, 32, False)}
    for m, was in zip(same, parts, strict=True):
        assert torch.equal(m.expand(torch.float64), was.expand(torch.float64))


def test_equal_forms_are_left_as_they_are():
    parts = [coded(group=64), coded(group=64, seed=1)]
    same = alike(parts)
    assert [(m.bits, m.group, m.minimums) for m in same] == [(4, 64, None)] * 2


def test_parts_ordered_differently_have_no_common_form():
    order = torch.randperm(70).int()
    assert alike([coded(order=order), coded()]) is None
    assert alike([coded(), coded(order=order)]) is None
    assert alike([coded(order=order), coded(order=order.flip(0))]) is None
    assert alike([coded(order=order), coded(order=order.clone())]) is not None


def test_bytes_are_those_of_a_kernels_memory():
    assert coded(64, 96).num_bytes == 64 * 96 / 2 + 64 * 3 * 2
    assert coded(64, 96, bits=8, minimums=True).num_bytes == 64 * 96 + 64 * 3 * 4
