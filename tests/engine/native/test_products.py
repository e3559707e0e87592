"""The products alone, which benchmarks measure the rest of a step against."""

import pytest
import torch


@pytest.mark.parametrize("num_threads", [1, 3])
def test_products_alone_leave_later_passes_as_they_were(kind, make, num_threads):
    model = make.decoder(kind, num_threads=num_threads)

    def logits():
        batch = make.batch(model, [(5, 5), (3, 9)])
        ids, positions, step = batch.inputs([list(range(5)), list(range(9))])
        batch.pool.data.zero_()
        return model.forward(ids, positions, batch.pool, step)

    before = logits()
    for tokens, sampled in ((1, 1), (130, 0), (40, 40), (0, 0)):
        model.products(tokens, sampled)
    assert torch.equal(logits(), before)


@pytest.mark.parametrize(("tokens", "sampled"), [(-1, 0), (1, -1), (3, 4)])
def test_counts_that_no_pass_has_are_refused(kind, make, tokens, sampled):
    with pytest.raises(IndexError, match="no such pass"):
        make.decoder(kind).products(tokens, sampled)
