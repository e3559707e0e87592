"""What is packed is what is read again, and what others' layouts say it is."""

from itertools import product

import numpy as np
import pytest
import torch

from engine.weights.packed import PackedFormat, PackedMatrix, packed_format, unpack_words
from engine.weights.packing import pack, pack_words, quantization_config


def matrix(out=16, size=64, *, bits=4, group=32, symmetric=False, scattered=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = size // group
    middle = 1 << (bits - 1)
    zeros = torch.randint(1, 1 << bits, (out, groups), generator=g, dtype=torch.int32)
    group_of = torch.arange(size) // group
    return PackedMatrix(
        bits=bits,
        codes=torch.randint(0, 1 << bits, (out, size), generator=g, dtype=torch.uint8),
        scales=(torch.rand(out, groups, generator=g) / 50).half().float(),
        zeros=torch.full_like(zeros, middle) if symmetric else zeros,
        group_of=group_of[torch.randperm(size, generator=g)] if scattered else group_of,
    )


FORMS = [
    ("gptq", {}),
    ("gptq", {"bits": 8}),
    ("gptq", {"symmetric": True}),
    ("gptq", {"scattered": True}),
    ("gptq", {"group": 64}),
    ("awq", {}),
    ("awq", {"group": 64}),
    ("pack-quantized", {}),
    ("pack-quantized", {"symmetric": True}),
    ("pack-quantized", {"bits": 8, "symmetric": True}),
    ("pack-quantized", {"bits": 8, "symmetric": True, "group": 64}),
]


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_the_loader_reads_the_codes_that_were_chosen(method, form):
    chosen = matrix(**form)
    group = -1 if form.get("group") == 64 else form.get("group", 32)
    section = quantization_config(
        method,
        bits=chosen.bits,
        group=group,
        symmetric=bool(form.get("symmetric")),
        ordered=bool(form.get("scattered")),
        damping=0.01,
        quantiser="test:1",
    )
    format_ = packed_format("test", {"quantization_config": section})
    assert isinstance(format_, PackedFormat)
    parts = pack(chosen, method)
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
    assert format_.fault(shapes, (16, 64)) is None
    again = format_.read(parts, (16, 64))
    assert again.bits == chosen.bits
    for field in ("codes", "scales", "zeros", "group_of"):
        assert torch.equal(getattr(again, field), getattr(chosen, field)), field
    assert torch.equal(again.coded().expand(torch.float32), chosen.expand(torch.float32))


def test_gptq_files_are_as_autogptq_packs_them():
    """Word by word, as `QuantLinear.pack` does in numpy."""
    m = matrix(seed=1)
    parts = pack(m, "gptq")
    ints = m.codes.T.numpy().astype(np.uint32)
    qweight = np.zeros((64 // 8, 16), dtype=np.uint32)
    for row, j in product(range(8), range(8)):
        qweight[row] |= ints[row * 8 + j] << np.uint32(4 * j)
    assert np.array_equal(parts["qweight"].numpy(), qweight.view(np.int32))
    zeros = (m.zeros.T.numpy() - 1).astype(np.uint32)
    qzeros = np.zeros((2, 16 // 8), dtype=np.uint32)
    for column, j in product(range(2), range(8)):
        qzeros[:, column] |= zeros[:, column * 8 + j] << np.uint32(4 * j)
    assert np.array_equal(parts["qzeros"].numpy(), qzeros.view(np.int32))
    assert parts["scales"].dtype == torch.float16
    assert parts["scales"].shape == (2, 16)
    assert parts["g_idx"].dtype == torch.int32


def test_awq_files_are_as_autoawq_packs_them():
    """As `WQLinear_GEMM.from_linear` does."""
    m = matrix(seed=2)
    parts = pack(m, "awq")
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for name, values in (("qweight", m.codes.T), ("qzeros", m.zeros.T)):
        values = values.numpy().astype(np.uint32)
        want = np.zeros((values.shape[0], 2), dtype=np.uint32)
        for column, i in product(range(2), range(8)):
            want[:, column] |= values[:, column * 8 + order[i]] << np.uint32(4 * i)
        assert np.array_equal(parts[name].numpy(), want.view(np.int32)), name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_are_packed_as_they_are_unpacked(bits, dim):
    values = torch.randint(
        0, 1 << bits, (32, 64), generator=torch.Generator().manual_seed(3), dtype=torch.int32
    )
    assert torch.equal(unpack_words(pack_words(values, bits, dim=dim), bits, dim=dim), values)


def test_words_that_are_not_full_are_filled_with_nothing():
    packed = pack_words(torch.full((1, 9), 15), 4, dim=1)
    assert packed.tolist() == [[-1, 15]]


def test_what_a_format_cannot_hold_is_our_own_mistake():
    with pytest.raises(AssertionError, match="groups of neighbours"):
        pack(matrix(scattered=True), "awq")
    with pytest.raises(AssertionError, match="not written"):
        pack(matrix(bits=8, group=64), "int-quantized")
    fine = matrix()
    with pytest.raises(AssertionError, match="float16"):
        pack(PackedMatrix(4, fine.codes, fine.scales + 1e-9, fine.zeros, fine.group_of), "gptq")
