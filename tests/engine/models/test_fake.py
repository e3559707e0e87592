import math

import pytest
import torch

from engine.models.fake import FakeModel

PROMPT = list(b"The quick brown fox jumps over the lazy dog.")


def test_answers_read_like_text_and_end_after_a_while(sequence):
    model = FakeModel()
    eos = model.eos_token_ids[0]
    text, ends = [], 0
    for seed in range(8):
        tokens = sequence(model).greedy([*PROMPT, 65 + seed], 150)
        ends += eos in tokens
        text += [token for token in tokens if token != eos]
    assert set(text) <= {10, *range(32, 127)}
    assert len(set(text)) > 30
    assert 2 <= ends <= 8


def test_the_distribution_leaves_sampling_a_choice(sequence):
    p = torch.softmax(sequence(FakeModel()).logits(PROMPT), -1)
    assert 0.02 < p.max() < 0.9
    assert (p > 0.005).sum() > 10


@pytest.mark.parametrize("block_tokens", [1, 8, 16, 256])
@pytest.mark.parametrize("size", [1, 7, 44])
def test_pages_and_chunks_do_not_change_a_bit(sequence, block_tokens, size):
    want = sequence(FakeModel()).logits(PROMPT)
    got = sequence(FakeModel(), block_tokens=block_tokens, seed=9, fill=math.nan)
    assert torch.equal(got.logits(PROMPT, size=size), want)


def test_every_single_stored_number_counts(sequence):
    one = sequence(FakeModel(), block_tokens=4)
    ids = PROMPT[:10]
    want = one.logits(ids)
    stored = one.pool.data[list(one.blocks[:3])]
    for index in torch.cartesian_prod(*(torch.arange(n) for n in stored.shape)).tolist():
        column, layer, kv, offset, head, dim = index
        if column * 4 + offset >= 9:
            continue  # the last token is written again, what lies behind it is not read
        at = (one.blocks[column], layer, kv, offset, head, dim)
        for wrong in (one.pool.data[at] + 1, 0.0, math.nan):
            kept = one.pool.data[at].clone()
            one.pool.data[at] = wrong
            assert not torch.equal(one.logits(ids[-1:], first=9), want), (index, wrong)
            one.pool.data[at] = kept
    assert torch.equal(one.logits(ids[-1:], first=9), want)


@pytest.mark.parametrize(
    "exchange",
    [
        lambda d, b: (d[b[0]], d[b[1]]),
        lambda d, b: (d[b[0], :, 0], d[b[0], :, 1]),
        lambda d, b: (d[b[0], 0], d[b[0], 1]),
        lambda d, b: (d[b[0], :, :, 0], d[b[0], :, :, 1]),
        lambda d, b: (d[b[0], :, :, :, 0], d[b[0], :, :, :, 1]),
    ],
    ids=["blocks", "K and V", "layers", "positions", "heads"],
)
def test_exchanged_kv_changes_the_logits(sequence, exchange):
    one = sequence(FakeModel(), block_tokens=4)
    want = one.logits(PROMPT)
    left, right = exchange(one.pool.data, one.blocks)
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)
    assert not torch.equal(one.logits(PROMPT[-1:], first=len(PROMPT) - 1), want)


def test_a_pass_without_rows_to_sample_returns_none(sequence):
    one = sequence(FakeModel())
    from engine.execution.inputs import step_inputs
    from engine.scheduling.plan import Chunk, StepPlan

    piece = Chunk(request_id="a", first_token=0, token_ids=(1, 2), blocks=one.blocks, sample=False)
    ids, positions, step = step_inputs(StepPlan(chunks=(piece,)), 16)
    assert one.model.forward(ids, positions, one.pool, step).shape == (0, 512)
