import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import RequestError
from engine.request import SampledToken, SamplingParams
from engine.sampling import Sampler, UnusableLogits, validate_params
from engine.sampling.noise import exponential

VOCAB = 300
EOS = (0, 1)


def params(**fields) -> SamplingParams:
    return SamplingParams(max_tokens=100_000, **fields)


def make_sampler(**requests: SamplingParams) -> Sampler:
    """Requests with the prompt 5, 6, 7."""
    sampler = Sampler(VOCAB, EOS)
    for request_id, p in requests.items():
        sampler.enter(request_id, p, (5, 6, 7), 3)
    return sampler


def random_logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * 2).to(dtype)


def ids_of(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


MIXTURE = {
    "greedy": params(temperature=0.0),
    "plain": params(seed=1),
    "hot": params(seed=2, temperature=1.7),
    "top_k": params(seed=3, top_k=20),
    "top_p": params(seed=2**64 - 1, top_p=0.8),
    "min_p": params(seed=5, min_p=0.02),
    "all": params(seed=6, temperature=0.7, min_p=0.01, top_k=50, top_p=0.95),
    "penalties": params(seed=7, repetition_penalty=1.3, frequency_penalty=0.5),
    "greedy_penalties": params(temperature=0.0, presence_penalty=1.5),
    "biased": params(seed=8, logit_bias=((9, 4.0), (10, -100.0))),
    "logprobs": params(seed=9, logprobs=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_gets_the_same_token_alone_and_in_any_batch_and_order(dtype):
    names = list(MIXTURE)
    together, alone, reverse = (make_sampler(**MIXTURE) for _ in range(3))
    for step in range(30):
        logits = random_logits(len(names), seed=step, dtype=dtype)
        positions = [3 + step] * len(names)
        got = together.sample(logits, names, positions)
        single = [
            alone.sample(logits[i : i + 1], [name], [3 + step])[0] for i, name in enumerate(names)
        ]
        backwards = reverse.sample(logits.flip(0), names[::-1], positions)[::-1]
        assert got == single == backwards


def test_leaving_and_entering_again_with_everything_known_changes_nothing():
    steady, preempted = make_sampler(**MIXTURE), make_sampler(**MIXTURE)
    names = list(MIXTURE)
    history = {name: [5, 6, 7] for name in names}
    for step in range(20):
        logits = random_logits(len(names), seed=100 + step)
        positions = [3 + step] * len(names)
        for name in names:
            preempted.leave(name)
            preempted.enter(name, MIXTURE[name], tuple(history[name]), 3)
        got = steady.sample(logits, names, positions)
        assert preempted.sample(logits, names, positions) == got
        for name, token in zip(names, got, strict=True):
            history[name].append(token.token_id)


def test_entering_again_replaces_the_old_history():
    p = params(temperature=0.0, presence_penalty=2.0)
    sampler = make_sampler(a=p)
    logits = torch.zeros(1, VOCAB)
    logits[0, 40], logits[0, 41] = 3.0, 2.0
    assert ids_of(sampler.sample(logits, ["a"], [3])) == [40]
    assert ids_of(sampler.sample(logits, ["a"], [4])) == [41]
    sampler.enter("a", p, (5, 6, 7), 3)
    assert ids_of(sampler.sample(logits, ["a"], [3])) == [40]


def test_a_plain_draw_is_the_race_of_probability_against_noise():
    sampler = make_sampler(a=params(seed=77))
    for position in range(3, 60):
        logits = random_logits(1, seed=position, dtype=torch.float64)
        noise = exponential(77, position, torch.arange(VOCAB))
        expected = int((logits[0].softmax(-1) / noise).argmax())
        assert ids_of(sampler.sample(logits, ["a"], [position])) == [expected]


def test_filters_do_not_change_the_token_as_long_as_it_survives_them():
    """The noise belongs to the token, not to its place among the candidates."""
    sampler = make_sampler(all=params(seed=5), some=params(seed=5, top_k=30))
    same = 0
    for position in range(3, 203):
        logits = random_logits(1, seed=position)
        (everything,) = sampler.sample(logits, ["all"], [position])
        (filtered,) = sampler.sample(logits, ["some"], [position])
        if everything.token_id in logits[0].topk(30).indices:
            assert filtered == everything
            same += 1
    assert same > 20


COMBINATIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "top_p": 0.9},
    {"repetition_penalty": 1.5, "top_p": 0.9},
    {"logit_bias": ((3, 2.0), (4, -2.0))},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4, "top_k": 10},
]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_the_draws_have_the_distribution_the_parameters_ask_for(fields):
    draws, vocab = 4000, 40
    p = params(**fields)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1.5
    prompt, output = (1, 2, 3), (4, 5, 5)

    expected = row.unsqueeze(0).clone()
    for token_id, bias in p.logit_bias:
        expected[0, token_id] += bias
    if p.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)
        expected = processor(torch.tensor([prompt + output]), expected)
    for token_id in set(output):
        expected[0, token_id] -= p.frequency_penalty * output.count(token_id) + p.presence_penalty
    chain = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    probabilities = chain(torch.zeros(1, 0, dtype=torch.long), expected).softmax(-1)[0]

    sampler = Sampler(vocab, (0,))
    counts = torch.zeros(vocab, dtype=torch.float64)
    logits = row.unsqueeze(0)
    for seed in range(draws):
        drawn = params(seed=seed, **fields)
        sampler.enter("a", drawn, prompt + output, len(prompt))
        counts[sampler.sample(logits, ["a"], [6])[0].token_id] += 1

    assert not counts[probabilities == 0].any()
    distance = 0.5 * float((counts / draws - probabilities).abs().sum())
    # The mean total variation of n fair draws is sum(sqrt(2 p (1 - p) / (pi n))) / 2.
    fair = 0.5 * float((2 * probabilities * (1 - probabilities) / (math.pi * draws)).sqrt().sum())
    assert distance < 1.6 * fair + 1e-9


def test_draws_at_successive_positions_of_one_seed_have_the_distribution_too():
    draws, vocab = 4000, 40
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sampler = Sampler(vocab, (0,))
    sampler.enter("a", params(seed=2**64 - 1), (1,), 1)
    tokens = [sampler.sample(row, ["a"], [i])[0].token_id for i in range(1, draws + 1)]
    probabilities = row[0].softmax(-1)
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    distance = 0.5 * float((counts / draws - probabilities).abs().sum())
    fair = 0.5 * float((2 * probabilities * (1 - probabilities) / (math.pi * draws)).sqrt().sum())
    assert distance < 1.6 * fair


def test_greedy_takes_the_lowest_id_of_equal_logits():
    sampler = make_sampler(a=params(temperature=0.0), b=params(temperature=1e-6))
    logits = torch.zeros(2, VOCAB)
    logits[:, [250, 30, 90]] = 1.0
    assert ids_of(sampler.sample(logits, ["a", "b"], [3, 3])) == [30, 30]


def test_top_k_of_one_is_greedy():
    sampler = make_sampler(greedy=params(temperature=0.0), one=params(top_k=1, seed=4))
    for step in range(20):
        logits = random_logits(1, seed=step).round().repeat(2, 1)
        first, second = sampler.sample(logits, ["greedy", "one"], [3 + step] * 2)
        assert first == second


def test_min_tokens_holds_back_eos_and_stop_ids_until_enough_were_emitted():
    p = params(temperature=0.0, min_tokens=2, stop_token_ids=(50,))
    sampler = make_sampler(a=p)
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 1, 50, 60]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    got = [ids_of(sampler.sample(logits, ["a"], [position]))[0] for position in (3, 4, 5)]
    assert got == [60, 60, 0]


def test_min_tokens_counts_what_was_emitted_before_a_migration():
    sampler = Sampler(VOCAB, EOS)
    sampler.enter("a", params(temperature=0.0, min_tokens=2), (5, 6, 7, 60), 3)
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 60]] = torch.tensor([9.0, 6.0])
    got = [ids_of(sampler.sample(logits, ["a"], [position]))[0] for position in (4, 5)]
    assert got == [60, 0]


def test_the_sampled_token_counts_for_the_next_penalty():
    sampler = make_sampler(a=params(temperature=0.0, frequency_penalty=1.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 8] = 2.5, 2.0
    got = [ids_of(sampler.sample(logits, ["a"], [3 + i]))[0] for i in range(5)]
    # 9: 2.5, 1.5, 1.5 | 8: 2.0, 2.0, 1.0 ...
    assert got == [9, 8, 9, 8, 9]


def test_logprobs_are_raw_whatever_the_processors_did():
    p = params(temperature=0.0, logit_bias=((77, 100.0),), logprobs=2)
    sampler = make_sampler(a=p)
    logits = random_logits(1)
    (token,) = sampler.sample(logits, ["a"], [3])
    expected = torch.log_softmax(logits[0], -1)
    best = expected.topk(2)
    assert token == SampledToken(
        77,
        float(expected[77]),
        tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )


def test_logprobs_zero_gives_the_chosen_token_only():
    sampler = make_sampler(a=params(temperature=0.0, logprobs=0))
    (token,) = sampler.sample(random_logits(1), ["a"], [3])
    assert token.logprob is not None
    assert token.top == ()


def test_narrow_and_strided_logits_are_widened_and_left_as_they_are():
    sampler = make_sampler(a=params(seed=3), b=params(temperature=0.0))
    narrow = random_logits(2).to(torch.bfloat16)
    wide = narrow.to(torch.float32)
    strided = wide.t().contiguous().t()
    before = strided.clone()
    assert not strided.is_contiguous()
    expected = sampler.sample(wide, ["a", "b"], [3, 3])
    assert sampler.sample(narrow, ["a", "b"], [3, 3]) == expected
    assert sampler.sample(strided, ["a", "b"], [3, 3]) == expected
    assert torch.equal(strided, before)


def test_no_rows_give_no_tokens():
    assert make_sampler().sample(torch.zeros(0, VOCAB), [], []) == []


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"seed": 1}, {"top_p": 0.9}], ids=str)
def test_a_row_with_nan_or_infinity_raises_and_names_its_request(poison, fields):
    sampler = make_sampler(good=params(**fields), bad=params(**fields))
    logits = random_logits(2)
    logits[1, 200] = poison
    with pytest.raises(UnusableLogits, match=r"request bad: .*position 9") as caught:
        sampler.sample(logits, ["good", "bad"], [3, 9])
    assert caught.value.request_id == "bad"


def test_a_row_of_minus_infinity_raises_also_when_the_processors_made_it_so():
    sampler = Sampler(4, (0,))
    sampler.enter("a", params(min_tokens=1, stop_token_ids=(1, 2, 3)), (1,), 1)
    sampler.enter("b", params(), (1,), 1)
    with pytest.raises(UnusableLogits, match=r"request a: .*-inf"):
        sampler.sample(torch.zeros(1, 4), ["a"], [1])
    with pytest.raises(UnusableLogits, match=r"request b: .*-inf"):
        sampler.sample(torch.full((1, 4), -math.inf), ["b"], [1])


def test_after_an_unusable_row_nothing_was_counted_and_the_others_can_be_sampled_again():
    p = params(temperature=0.0, presence_penalty=2.0)
    sampler = make_sampler(good=p, bad=p)
    logits = torch.zeros(2, VOCAB)
    logits[0, 40], logits[0, 41], logits[1, 0] = 3.0, 2.0, math.nan
    with pytest.raises(UnusableLogits):
        sampler.sample(logits, ["good", "bad"], [3, 3])
    assert ids_of(sampler.sample(logits[:1], ["good"], [3])) == [40]


def test_leaving_forgets_and_unknown_requests_may_leave():
    sampler = make_sampler(a=params(), b=params(frequency_penalty=1.0))
    sampler.leave("a")
    sampler.leave("a")
    sampler.leave("never came")
    assert sampler.num_requests == 1
    sampler.leave("b")
    assert sampler.num_requests == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": ((300, 1.0),)}, "logit_bias"),
        ({"stop_token_ids": (9, -1)}, "stop_token_ids"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_the_clients_mistake(fields, param):
    with pytest.raises(RequestError, match="must lie between 0 and 299") as caught:
        make_sampler(a=params(**fields))
    assert caught.value.param == param
    with pytest.raises(RequestError):
        validate_params(params(**fields), VOCAB)
    validate_params(params(logit_bias=((299, 1.0),), stop_token_ids=(0,)), VOCAB)


def test_a_history_outside_the_vocabulary_is_refused_before_it_can_break_a_batch():
    sampler = Sampler(VOCAB, EOS)
    with pytest.raises(RequestError, match="token ids 5 to 300"):
        sampler.enter("a", params(repetition_penalty=1.2), (5, 300), 1)
    assert sampler.num_requests == 0


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 10.0},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 5e-324},
        {"temperature": 1.1e-5},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
        {"min_p": 1.0, "top_p": 5e-324, "top_k": 1},
        {"logit_bias": tuple((i, -100.0) for i in range(VOCAB))},
        {"logit_bias": tuple((i, 100.0) for i in range(VOCAB)), "temperature": 1.1e-5},
        {"min_tokens": 100, "stop_token_ids": tuple(range(VOCAB - 1))},
    ],
    ids=str,
)
def test_whatever_is_accepted_leaves_a_token_to_choose(extreme):
    sampler = make_sampler(a=params(**extreme))
    for position in range(3, 20):
        logits = random_logits(1, seed=position) * 20
        (token,) = sampler.sample(logits, ["a"], [position])
        assert 0 <= token.token_id < VOCAB


@pytest.mark.parametrize("penalty", [0.0, 5e-324, 0.0099, 10.1, math.nan])
def test_a_penalty_that_would_make_logits_infinite_is_refused_with_its_limits(penalty):
    with pytest.raises(RequestError, match=r"repetition_penalty=.*between 0\.01 and 10"):
        params(repetition_penalty=penalty)
