import numpy as np
import pytest
import torch

from engine.request import derive_seed
from engine.sampling.noise import (
    VocabularyRace,
    exponential,
    exponential_numpy,
    noise_bits,
    noise_bits_numpy,
    noise_key,
)

MASK = (1 << 64) - 1
SEEDS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]


def splitmix64(state: int, index: int) -> int:
    """Output `index` of the published generator, in python integers."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def bits_of(key: int, token_id: int) -> int:
    pair = splitmix64(key, token_id // 2)
    return pair >> 32 if token_id % 2 else pair & (2**32 - 1)


def test_the_published_first_outputs_of_splitmix64_come_out():
    # Reference vector of the generator for state 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, i) for i in range(3)] == published
    halves = noise_bits(1234567, torch.arange(6)).tolist()
    assert [low + (high << 32) for low, high in zip(halves[::2], halves[1::2], strict=True)] == (
        published
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_and_numpy_give_the_bits_of_splitmix64(seed):
    key = noise_key(seed, 17)
    ids = [0, 1, 2, 3, 255, 49151, 151935, 2**31 - 1]
    expected = [bits_of(key, i) for i in ids]
    assert noise_bits_numpy(key, np.array(ids)).tolist() == expected
    assert noise_bits(key, torch.tensor(ids)).tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_the_exponential_is_minus_log_of_a_uniform_of_32_bits(seed):
    got = exponential(seed, 5, torch.arange(1000))
    assert got.dtype == torch.float64
    bits = np.array([bits_of(noise_key(seed, 5), i) for i in range(1000)])
    np.testing.assert_allclose(got.numpy(), -np.log((bits + 0.5) / 2.0**32), rtol=1e-15)


def test_the_path_for_other_devices_differs_by_no_more_than_the_last_bit_of_the_logarithm():
    ids = torch.arange(4096)
    bits = noise_bits(noise_key(9, 9), ids).to(torch.float64)
    torch.testing.assert_close(
        -torch.log((bits + 0.5) * 2.0**-32), exponential(9, 9, ids), rtol=4e-16, atol=0
    )


def test_the_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    every = exponential(3, 100, torch.arange(49152))
    some = torch.tensor([49151, 7, 7, 12345, 0])
    assert torch.equal(exponential(3, 100, some), every[some])
    assert torch.equal(exponential(3, 100, torch.tensor([12345])), every[12345:12346])


def test_seed_position_and_token_each_change_the_noise():
    base = exponential(1, 1, torch.arange(64))
    for other in (exponential(2, 1, torch.arange(64)), exponential(1, 2, torch.arange(64))):
        assert not (base == other).any()
    assert len(set(base.tolist())) == 64


def test_the_two_tokens_that_share_a_hash_are_independent():
    noise = exponential(1, 1, torch.arange(200_000))
    correlation = torch.corrcoef(torch.stack([noise[::2], noise[1::2]]))[0, 1]
    assert abs(float(correlation)) < 4 / np.sqrt(100_000)


def test_the_noise_is_exponential():
    # Kolmogorov-Smirnov: largest distance of the two distribution functions, 1.63/sqrt(n) at 1 %.
    n = 200_000
    sample = np.sort(exponential(42, 0, torch.arange(n)).numpy())
    cdf = 1 - np.exp(-sample)
    steps = np.arange(n + 1) / n
    distance = max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())
    assert distance < 1.63 / np.sqrt(n)


def test_neighbouring_positions_seeds_and_derived_choices_are_uncorrelated():
    n = 100_000
    ids = torch.arange(n)
    base = exponential(1000, 50, ids)
    others = [
        exponential(1000, 51, ids),
        exponential(1001, 50, ids),
        exponential(derive_seed(1000, 1), 50, ids),
        exponential(1000, 50, ids + 1),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(float(correlation)) < 4 / np.sqrt(n)


def test_one_token_over_many_positions_is_exponential_too():
    ids = torch.tensor([11])
    draws = torch.cat([exponential(77, position, ids) for position in range(20_000)])
    assert abs(float(draws.mean()) - 1) < 4 / np.sqrt(20_000)
    assert abs(float((draws < np.log(2)).double().mean()) - 0.5) < 4 * 0.5 / np.sqrt(20_000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 300, 20001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_the_pruned_race_has_the_winner_of_the_full_one(dtype, vocab_size, spread):
    generator = np.random.default_rng(vocab_size)
    race = VocabularyRace(vocab_size)
    ids = np.arange(vocab_size)
    for position in range(60):
        logits = (generator.standard_normal(vocab_size) * spread).astype(dtype)
        temperature = [1.0, 0.3, 1.9][position % 3]
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
        key = noise_key(8, position)
        full = int((weights / exponential_numpy(key, ids)).argmax())
        assert race.winner(key, logits, temperature, int(logits.argmax())) == full


def test_the_pruned_race_never_picks_an_impossible_token():
    race = VocabularyRace(100)
    logits = np.full(100, -np.inf, dtype=np.float32)
    logits[[13, 90]] = 1.0
    winners = {race.winner(noise_key(0, p), logits, 1.0, 13) for p in range(64)}
    assert winners == {13, 90}
