import hashlib
import math

import pytest
import torch

from engine.models.tiny import tiny_model, tiny_tensors

PROMPT = list(b"The quick brown fox jumps over the lazy dog.")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_the_weights_are_the_same_on_every_machine():
    digest = hashlib.sha256()
    for name, tensor in tiny_tensors().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() == (
        "164a97bb69be694295d180cc68aa5c27e35192bdb1a430bddfec7e888ae1ff7f"
    )


def test_everything_is_float64(model, sequence):
    assert model.layout.dtype == "float64"
    assert sequence(model).logits(PROMPT).dtype == torch.float64


def test_another_dtype_has_another_fingerprint(model):
    other = tiny_model(torch.float32)
    assert other.layout.dtype == "float32"
    assert other.layout.fingerprint != model.layout.fingerprint


def test_answers_are_diverse(model, sequence):
    tokens = sequence(model).greedy(PROMPT, 120)
    assert len(set(tokens)) > 25
    assert tokens[-20:] != tokens[-40:-20]


@pytest.mark.parametrize("block_tokens", [8, 16, 256])
@pytest.mark.parametrize("size", [1, 7])
def test_pages_and_chunks_give_equal_tokens(model, sequence, block_tokens, size):
    """The pool is NaN wherever this sequence has not written."""
    want = sequence(model).greedy(PROMPT, 40)
    other = sequence(model, block_tokens=block_tokens, seed=9, fill=math.nan)
    assert other.greedy(PROMPT, 40, size=size) == want


def test_rechunking_moves_logits_by_rounding_only(model, sequence):
    whole = sequence(model).logits(PROMPT)
    chunked = sequence(model).logits(PROMPT, size=7)
    assert (whole - chunked).abs().max() < 1e-11


def test_wrong_kv_changes_the_logits(model, sequence):
    one = sequence(model)
    want = one.logits(PROMPT)
    one.pool.data[one.blocks[0], 0, 1, 3, 0, 0] += 0.5
    got = one.logits(PROMPT[-1:], first=len(PROMPT) - 1)
    assert (got - want).abs().max() > 1e-6
