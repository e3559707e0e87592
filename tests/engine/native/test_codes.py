"""Products of codes, and decoders whose matrices are codes."""

import math
from dataclasses import replace

import pytest
import torch

from engine.models.decoder import Decoder
from engine.models.tiny import TINY_ARCHITECTURE, tiny_fingerprint, tiny_tensors
from engine.native.decoder import NativeDecoder
from engine.native.library import native_available
from engine.quantisation.codes import CodedMatrix
from engine.quantisation.rounding import round_to_codes


def matrix(out, size, *, bits, group, minimums, narrow=True, ordered=False, seed=0):
    """Random codes; narrow: scales that float16 holds."""
    g = torch.Generator().manual_seed(seed)
    shape = (out, -(-size // group))

    def scales():
        x = torch.randn(shape, generator=g) / 7
        return x.half().float() if narrow else x * 1e-6

    return CodedMatrix(
        bits=bits,
        group=group,
        codes=torch.randint(0, 1 << bits, (out, size), generator=g, dtype=torch.uint8),
        scales=scales(),
        minimums=scales() if minimums else None,
        order=torch.randperm(size, generator=g).int() if ordered else None,
    )


def rows_of(count, size, dtype, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=g, dtype=torch.float64)
    x[:, ::7] *= 30  # some numbers are much larger than the others
    return x.to(dtype).double()


def limit(x, weight, dtype):
    """How far a product may be off: each row's rounding to 16 bits, and sums in float32."""
    if dtype == torch.float64:
        return 1e-13 * (x.abs() @ weight.abs().T)
    rounding = x.abs().amax(1, keepdim=True) / 65534 * weight.abs().sum(1)
    return rounding * 1.01 + 1e-5 * (x.abs() @ weight.abs().T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize(
    ("out", "size", "group", "narrow", "ordered"),
    [
        (1, 1, 32, True, False),
        (33, 96, 32, True, False),
        (70, 37, 64, False, False),
        (31, 200, 128, True, True),
        (64, 64, 32, False, True),
    ],
)
def test_a_product_of_codes_is_that_of_what_they_stand_for(
    kind, make, bits, minimums, out, size, group, narrow, ordered
):
    dtype, _ = kind
    model = make.decoder(kind, num_threads=1 + bits // 4)
    coded = matrix(
        out, size, bits=bits, group=group, minimums=minimums, narrow=narrow, ordered=ordered
    )
    weight = coded.expand(torch.float64)
    for rows in (1, 2, 3, 4, 5, 6, 7, 24, 25, 65, 130):
        x = rows_of(rows, size, dtype, seed=rows)
        got = model.linear_codes(x, coded)
        assert torch.isfinite(got).all()
        assert ((got.double() - x @ weight.T).abs() <= limit(x, weight, dtype)).all(), rows


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_codes_and_rows_do_not_overflow(kind, make, bits):
    model = make.decoder(kind)
    whole = torch.ones(33, 256)
    coded = CodedMatrix(
        bits=bits,
        group=128,
        codes=torch.full((33, 256), (1 << bits) - 1, dtype=torch.uint8),
        scales=whole[:, :2],
        minimums=whole[:, :2] * 0,
    )
    x = torch.full((7, 256), 3.0, dtype=torch.float64)
    got = model.linear_codes(x, coded).double()
    want = 3.0 * 256 * ((1 << bits) - 1)
    assert (got - want).abs().max() < 1e-6 * want
    assert (model.linear_codes(-x, coded).double() + want).abs().max() < 1e-6 * want


@pytest.mark.parametrize("minimums", [False, True])
def test_rows_do_not_depend_on_their_company(kind, make, minimums):
    dtype, _ = kind
    model = make.decoder(kind, num_threads=2)
    coded = matrix(45, 83, bits=4, group=32, minimums=minimums)
    x = rows_of(70, 83, dtype)
    whole = model.linear_codes(x, coded)
    for rows in (slice(0, 1), slice(3, 8), slice(10, 23), slice(1, 70)):
        assert torch.equal(model.linear_codes(x[rows], coded), whole[rows])


def test_rows_of_nothing_and_rows_that_are_no_numbers(kind, make):
    dtype, _ = kind
    model = make.decoder(kind)
    coded = matrix(40, 64, bits=8, group=32, minimums=True)
    x = rows_of(5, 64, dtype)
    want = model.linear_codes(x, coded)
    x[1], x[2, 5], x[3, 63] = 0, math.nan, math.inf
    got = model.linear_codes(x, coded)
    assert (got[1] == 0).all()
    assert torch.isnan(got[2]).all()
    assert not torch.isfinite(got[3]).any()
    assert torch.equal(got[[0, 4]], want[[0, 4]])


def coded_weights(architecture, tensors, *, parts=None, bits=4, group=32):
    head = "embed" if architecture.tied_embeddings else "head"
    return {
        name: round_to_codes(x.float(), 8 if name == head else bits, group)
        for name, x in tensors.items()
        if x.ndim == 2
        and (name != "embed" or name == head)
        and (parts is None or name.rpartition(".")[2] in parts)
    }


def expanded(tensors, coded):
    """The tensors as the codes say; of a tied model with another embedding than head: not this."""
    return {
        name: coded[name].expand(torch.float64) if name in coded else x
        for name, x in tensors.items()
    }


def decoder(kind, make, *, coded, num_threads=1, **changes):
    dtype, variant = kind
    architecture = replace(make.small, **changes)
    return NativeDecoder(
        architecture,
        make.tensors(architecture),
        coded=coded,
        dtype=dtype,
        fingerprint="small",
        variant=variant,
        num_threads=num_threads,
    )


IDS = [(7 * i + 3) % 70 for i in range(120)]


def all_rows(make, model, *, block_tokens=16, chunks=(120,), others=0):
    """The logits of every row of one request, computed in chunks beside `others` requests."""
    batch = make.batch(model, [(1, 120)] + [(9, 9)] * others, block_tokens=block_tokens)
    out, first = [], 0
    for size in chunks:
        batch.lengths[0] = (size, first + size)
        flat, positions, step = batch.inputs([IDS] * (1 + others))
        step.last = torch.arange(size)
        out.append(model.forward(flat, positions, batch.pool, step))
        first += size
    assert first == 120
    return torch.cat(out)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_pages_batches_chunks_and_threads_do_not_change_a_bit(kind, make, bits, num_threads):
    coded = coded_weights(make.small, make.tensors(make.small), bits=bits)
    want = all_rows(make, decoder(kind, make, coded=coded))
    model = decoder(kind, make, coded=coded, num_threads=num_threads)
    assert torch.equal(all_rows(make, model, block_tokens=7, chunks=(1, 5, 30, 84)), want)
    assert torch.equal(all_rows(make, model, chunks=(80, 40), others=5), want)


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True, "qkv_bias": True}, {"tied_embeddings": True}]
)
@pytest.mark.parametrize("parts", [None, {"q", "k", "v", "down"}, {"q", "gate", "up", "head"}])
def test_a_decoder_of_codes_is_torchs_of_what_they_stand_for(kind, make, options, parts):
    """`q` alone of its product, beside `k` and `v` that are none, is expanded."""
    dtype, _ = kind
    architecture = replace(make.small, **options)
    tensors = make.tensors(architecture)
    coded = coded_weights(architecture, tensors, parts=parts)
    model = decoder(kind, make, coded=coded, **options)
    # A tied embedding is looked up as it was, and coded as the head only.
    oracle = expanded(tensors, {name: m for name, m in coded.items() if name != "embed"})
    if "embed" in coded:
        architecture = replace(architecture, tied_embeddings=False)
        oracle["head"] = coded["embed"].expand(torch.float64)
    got = all_rows(make, model)
    want = all_rows(make, Decoder(architecture, oracle, dtype=torch.float64, fingerprint="small"))
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-2, torch.bfloat16: 0.5}[dtype]
    assert float((got.double() - want).abs().max()) < tolerance * float(want.abs().max())
    if dtype != torch.float64:
        assert float((got.double() - want).abs().mean()) < 0.05 * tolerance * float(want.std())


def test_parts_of_one_product_may_differ_in_form(kind, make):
    tensors = make.tensors(make.small)
    plain = coded_weights(make.small, tensors)
    mixed = dict(plain)
    for i in range(2):
        mixed[f"layers.{i}.k"] = round_to_codes(tensors[f"layers.{i}.k"].float(), 8, 64)
        mixed[f"layers.{i}.up"] = round_to_codes(tensors[f"layers.{i}.up"].float(), 4, 128)
    want_model = Decoder(
        make.small, expanded(tensors, mixed), dtype=torch.float64, fingerprint="small"
    )
    got = all_rows(make, decoder(kind, make, coded=mixed)).double()
    want = all_rows(make, want_model)
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-2, torch.bfloat16: 0.5}[kind[0]]
    assert float((got - want).abs().max()) < tolerance * float(want.abs().max())


@pytest.mark.skipif(native_available("float64") is not None, reason="not built")
@pytest.mark.parametrize("bits", [4, 8])
def test_the_tiny_model_of_codes_in_float64_says_what_torch_says(make, bits):
    tensors = tiny_tensors()
    coded = coded_weights(TINY_ARCHITECTURE, tensors, bits=bits)
    options = {"dtype": torch.float64, "fingerprint": tiny_fingerprint(torch.float64)}
    native = NativeDecoder(TINY_ARCHITECTURE, tensors, coded=coded, num_threads=2, **options)
    plain = Decoder(TINY_ARCHITECTURE, expanded(tensors, coded), **options)

    def greedy(model, size):
        tokens, first = list(b"The quick brown fox jumps over the lazy dog."), 0
        batch = make.batch(model, [(1, 104)])
        while len(tokens) < 90:
            stop = min(first + size, len(tokens))
            batch.lengths = [(stop - first, stop)]
            flat, positions, step = batch.inputs([tokens])
            logits = model.forward(flat, positions, batch.pool, step)
            if stop == len(tokens):
                tokens.append(int(logits[0].argmax()))
            first = stop
        return tokens

    assert greedy(native, 7) == greedy(native, 44) == greedy(plain, 44)


def test_products_alone_read_codes_too(kind, make):
    coded = coded_weights(make.small, make.tensors(make.small))
    model = decoder(kind, make, coded=coded, num_threads=2)
    before = all_rows(make, model)
    for tokens, sampled in ((1, 1), (130, 0), (40, 40)):
        model.products(tokens, sampled)
    assert torch.equal(all_rows(make, model), before)
