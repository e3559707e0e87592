"""transformers' logits processors are the oracle for each step and for the whole chain."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import SamplingParams
from engine.sampling.processors import (
    TokenCounts,
    candidates,
    edit_logits,
    front,
    keeps_everything,
    top_logprobs,
)

VOCAB = 1000


def params(**fields) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **fields)


def random_row(seed: int, dtype: torch.dtype = torch.float64, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(VOCAB, generator=generator, dtype=torch.float64) * spread).to(dtype)


def dense(row: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Our candidates as a distribution over the vocabulary."""
    kept = candidates(row, p)
    out = torch.zeros(len(row), dtype=torch.float64)
    out[kept.ids] = kept.weights / kept.weights.sum()
    return out


def oracle(row: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.min_p > 0:
        chain.append(MinPLogitsWarper(p.min_p))
    if p.top_k > 0:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    scores = chain(torch.zeros(1, 0, dtype=torch.long), row.unsqueeze(0).clone())
    return scores.softmax(-1)[0].double()


def edited(row, p, prompt=(), output=(), forbidden=()):
    counts = TokenCounts(prompt, output)
    return edit_logits(
        row, p, forbidden_ids=forbidden, num_output_tokens=len(output), counts=counts
    )


COMBINATIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400},
    {"top_k": 999},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.9, "temperature": 2.0},
    {"top_p": 0.5, "temperature": 0.1},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-6, "temperature": 1.5},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 0.02, "top_p": 0.7},
    {"min_p": 0.02, "top_k": 5},
    {"temperature": 0.8, "min_p": 0.01, "top_k": 60, "top_p": 0.95},
]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_may_be_chosen_and_how_likely_is_what_transformers_says(fields, dtype):
    for seed in range(5):
        row = random_row(seed, dtype)
        # In float64: the running sums of float32 decide otherwise at the border of top_p.
        ours, theirs = dense(row, params(**fields)), oracle(row.double(), params(**fields))
        assert ((ours > 0) == (theirs > 0)).all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.9, 0.99])
def test_the_nucleus_is_right_when_it_holds_a_few_tokens_and_when_it_holds_most(spread, top_p):
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(30_000, generator=generator, dtype=torch.float64) * spread
    ours, theirs = dense(row, params(top_p=top_p)), oracle(row, params(top_p=top_p))
    assert ((ours > 0) == (theirs > 0)).all()


def test_candidates_come_likeliest_first_with_weights_relative_to_the_first():
    row = torch.tensor([1.0, 3.0, 2.0, 3.0], dtype=torch.float64)
    kept = candidates(row, params(top_k=3))
    assert kept.ids.tolist() == [1, 3, 2]
    torch.testing.assert_close(
        kept.weights, torch.tensor([1.0, 1.0, math.exp(-1.0)], dtype=torch.float64)
    )


def test_equal_logits_at_the_border_of_top_k_stay_by_lower_id():
    row = torch.zeros(500)
    row[[400, 20, 300, 10]] = 5.0
    row[450] = 6.0
    assert candidates(row, params(top_k=3)).ids.tolist() == [450, 10, 20]
    # As many ties as there are groups of neighbours and more.
    assert candidates(torch.zeros(500), params(top_k=2)).ids.tolist() == [0, 1]


def test_equal_logits_at_the_border_of_top_p_stay_by_lower_id():
    row = torch.full((8,), -1e4, dtype=torch.float64)
    row[[6, 1, 4, 2]] = 0.0
    assert candidates(row, params(top_p=0.5)).ids.tolist() == [1, 2]
    assert candidates(row, params(top_p=0.51)).ids.tolist() == [1, 2, 4]


def test_top_k_compares_logits_that_differ_by_less_than_their_weights_can_show():
    row = torch.zeros(10, dtype=torch.float32)
    row[3], row[7] = 1e-9, 2e-9
    assert candidates(row, params(top_k=1)).ids.tolist() == [7]


def test_top_p_counts_on_what_top_k_left_not_on_the_whole_vocabulary():
    # Of ten equal tokens top_k leaves four; 0.5 of those is two, 0.5 of all would be five.
    assert candidates(torch.zeros(10), params(top_k=4, top_p=0.5)).ids.tolist() == [0, 1]


def test_top_p_counts_on_what_min_p_left():
    row = torch.tensor([0.0, math.log(0.5), math.log(0.4)], dtype=torch.float64)
    # min_p leaves the weights 1 and 0.5, of which the first is 0.67; of all three it is 0.53.
    assert candidates(row, params(min_p=0.45, top_p=0.6)).ids.tolist() == [0]
    assert candidates(row, params(min_p=0.45, top_p=0.7)).ids.tolist() == [0, 1]


def test_forbidden_tokens_have_no_weight_whatever_is_kept():
    row = torch.zeros(100)
    row[:99] = -math.inf
    for fields in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        kept = candidates(row, params(**fields))
        assert kept.ids[0] == 99
        assert kept.weights[1:].sum() == 0


def test_a_temperature_just_above_greedy_overflows_nothing():
    row = random_row(0, torch.float32)
    kept = candidates(row, params(temperature=1e-5, top_p=0.9))
    assert kept.ids.tolist() == [int(row.argmax())]


@pytest.mark.parametrize("k", [1, 2, 7, 100, 999, 1000, 5000])
def test_the_front_holds_the_k_largest_and_every_tie_at_the_border(k):
    for seed in range(5):
        row = random_row(seed).round()
        ids = front(row, k)
        border = row.sort(descending=True).values[min(k, VOCAB) - 1]
        assert ids.tolist() == sorted(ids.tolist())
        assert set((row >= border).nonzero().squeeze(-1).tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output(penalty):
    row = random_row(3)
    prompt, output = (1, 2, 3, 3, 3), (500, 3, 999)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), row.unsqueeze(0).clone()
    )[0]
    assert torch.equal(edited(row, params(repetition_penalty=penalty), prompt, output), theirs)


def test_frequency_counts_every_emission_and_presence_counts_once_and_neither_the_prompt():
    row = torch.zeros(10, dtype=torch.float64)
    p = params(frequency_penalty=0.5, presence_penalty=0.25)
    changed = edited(row, p, prompt=(1, 1, 2), output=(2, 3, 3, 3))
    assert changed.tolist() == [0, 0, -0.75, -1.75, 0, 0, 0, 0, 0, 0]


def test_repetition_comes_before_frequency():
    row = torch.tensor([4.0, 1.0])
    p = params(repetition_penalty=2.0, frequency_penalty=1.0)
    assert edited(row, p, output=(0,)).tolist() == [1.0, 1.0]


def test_min_tokens_is_that_of_transformers_and_ends_with_the_last_needed_token():
    row = random_row(4)
    p = params(min_tokens=3)
    for num_output in range(5):
        ids = torch.zeros(1, 10 + num_output, dtype=torch.long)
        processor = MinNewTokensLengthLogitsProcessor(10, 3, [7, 8], device="cpu")
        theirs = processor(ids, row.unsqueeze(0).clone())[0]
        ours = edit_logits(row, p, forbidden_ids=(7, 8), num_output_tokens=num_output, counts=None)
        assert torch.equal(ours, theirs)


def test_a_bias_cannot_bring_back_what_min_tokens_forbids():
    row = torch.zeros(4)
    p = params(min_tokens=1, logit_bias=((2, 100.0), (1, -3.0)))
    changed = edit_logits(row, p, forbidden_ids=(2,), num_output_tokens=0, counts=None)
    assert changed.tolist() == [0.0, -3.0, -math.inf, 0.0]


def test_the_bias_comes_before_the_repetition_penalty():
    row = torch.zeros(2)
    p = params(logit_bias=((0, 4.0),), repetition_penalty=2.0)
    assert edited(row, p, prompt=(0,)).tolist() == [2.0, 0.0]


def test_edits_leave_the_row_they_were_given_alone():
    row = random_row(1)
    before = row.clone()
    edited(row, params(repetition_penalty=1.5, min_tokens=4), (1, 2), (3,), (5,))
    candidates(row, params(top_p=0.9, temperature=0.5))
    assert torch.equal(row, before)


def test_counts_grow_past_their_first_room_and_match_counting_afresh():
    grown = TokenCounts((1, 2), ())
    output = [(7 * i * i) % 300 for i in range(500)]
    for token_id in output:
        grown.add(token_id)
    fresh = TokenCounts((1, 2), output)
    as_dict = dict(zip(grown.ids.tolist(), grown.emitted.tolist(), strict=True))
    assert as_dict == dict(zip(fresh.ids.tolist(), fresh.emitted.tolist(), strict=True))
    assert as_dict[2] == output.count(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_the_log_softmax_of_the_raw_row(dtype):
    row = random_row(6, dtype)
    logprob, top = top_logprobs(row, 123, 20)
    expected = torch.log_softmax(row, -1)
    assert logprob == float(expected[123])
    values, ids = expected.topk(20)
    assert top == tuple(zip(ids.tolist(), values.tolist(), strict=True))


def test_top_logprobs_break_ties_by_lower_id_and_leave_out_the_impossible():
    row = torch.full((200,), -math.inf)
    row[[150, 20, 60]] = 1.0
    logprob, top = top_logprobs(row, 60, 5)
    assert logprob == pytest.approx(-math.log(3))
    assert [token_id for token_id, _ in top] == [20, 60, 150]
    assert top_logprobs(row, 60, 2)[1] == top[:2]
    assert top_logprobs(row, 60, 0)[1] == ()


def test_everything_is_kept_when_each_filter_is_off_or_too_wide_to_bind():
    assert keeps_everything(params(), VOCAB)
    assert keeps_everything(params(top_k=VOCAB), VOCAB)
    assert not keeps_everything(params(top_k=VOCAB - 1), VOCAB)
    assert not keeps_everything(params(top_p=0.999), VOCAB)
    assert not keeps_everything(params(min_p=1e-9), VOCAB)
