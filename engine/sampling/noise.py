"""Stateless noise: `exponential(seed, position, token_id)`.

Sampling is the race argmax p[i] / E[i] with E[i] ~ Exp(1), which draws token i with probability
p[i]. Because E depends on nothing but (seed, position, token id), a seed gives the same text in any
batch, on any rank, after preemption, after hand-over to another replica and with any drafter. There
is no generator state to carry.

    key  = mix(mix(seed ^ DOMAIN) + (position + 1) * STRIDE)     python integers, once a row
    pair = mix(key + (token_id // 2 + 1) * GOLDEN)               splitmix64 of `key`
    k    = the lower half of `pair` for an even token_id, the upper half for an odd one
    E    = -log((k + 0.5) / 2**32)                               float64, always in (0, 23)

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014). The integer part has the same bits on every device and in both
implementations below; only the last bit of the logarithm may differ between devices. One hash
serves two tokens because hashing is most of the cost of a row without top_k or top_p; with 32 bits
the probability of a token is off by about 2**-32.
"""

# Torch and numpy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
# Fractional digits of pi, so that the seeds `derive_seed` hands to further choices (outputs of the
# plain splitmix64 stream of the first seed) never coincide with keys made here.
_DOMAIN = 0x243F6A8885A308D3
_STRIDE = 0xD1B54A32D192ED03

_MASK32 = (1 << 32) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL1) & _MASK64
    z = ((z ^ (z >> 27)) * _MUL2) & _MASK64
    return z ^ (z >> 31)


def noise_key(seed: int, position: int) -> int:
    """Unsigned 64-bit key of one row.

    seed: unsigned 64 bit. position: absolute position of the token being sampled.
    """
    return _mix((_mix((seed ^ _DOMAIN) & _MASK64) + (position + 1) * _STRIDE) & _MASK64)


def exponential(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Exp(1) noise of the given tokens: int64 in, float64 of the same shape and device out."""
    key = noise_key(seed, position)
    if token_ids.device.type == "cpu":
        return torch.from_numpy(exponential_numpy(key, token_ids.numpy()))
    return -torch.log((noise_bits(key, token_ids).to(torch.float64) + 0.5) * 2.0**-32)


def signed(z: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return z - (1 << 64) if z >> 63 else z


def _shift_right(z: Tensor, n: int) -> Tensor:
    # Torch shifts int64 arithmetically; the mask makes it the logical shift the hash is defined by.
    return (z >> n) & ((1 << (64 - n)) - 1)


def noise_bits(key: int | Tensor, token_ids: Tensor) -> Tensor:
    """The 32 random bits of each token as int64, computed on the tensor's own device.

    key: of one row, unsigned; or of many, as int64 `signed` of each, `[rows, 1]`.
    """
    of_row = signed(key) if isinstance(key, int) else key
    z = ((token_ids >> 1) + 1) * signed(_GOLDEN) + of_row
    z = (z ^ _shift_right(z, 30)) * signed(_MUL1)
    z = (z ^ _shift_right(z, 27)) * signed(_MUL2)
    z = z ^ _shift_right(z, 31)
    return (z >> ((token_ids & 1) * 32)) & _MASK32


# On a CPU numpy's unsigned 64-bit and comparison loops cost a half to a tenth of torch's, so that
# is what runs there. The tests hold both to the same bits.


def noise_bits_numpy(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`noise_bits` for a numpy array."""
    ids = token_ids.astype(np.uint64)
    z = ((ids >> np.uint64(1)) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL2)
    z ^= z >> np.uint64(31)
    return (z >> ((ids & np.uint64(1)) * np.uint64(32))) & np.uint64(_MASK32)


def exponential_numpy(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """`exponential` for a numpy array and a key from `noise_key`."""
    return -np.log((noise_bits_numpy(key, token_ids).astype(np.float64) + 0.5) * 2.0**-32)


class VocabularyRace:
    """The race over a whole vocabulary on a CPU: a hash for every token, arithmetic for a few.

    With u = 1 - v, E = -log(1 - v) >= v, and the likeliest token already has the ratio r = E / p.
    So a token can win only if v < r * p, and with it v < r * (largest p of its group). That is one
    comparison of integers a token; weights and exact noise are computed for the few that pass. The
    winner is that of the full race.

    Holds scratch memory (17 bytes a token): one instance serves one thread.
    """

    _GROUPED = 64

    def __init__(self, vocab_size: int) -> None:
        # Scratch is kept because fresh arrays of this size are mapped and faulted in every time.
        num_pairs = -(-vocab_size // 2)
        self._steps = np.arange(1, num_pairs + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._pairs = np.empty_like(self._steps)
        self._shifted = np.empty_like(self._steps)
        # Token i is in group i % num_groups, so that comparing runs along contiguous memory. Tokens
        # from `_grouped` on are in none and always pass.
        self._num_groups = vocab_size // self._GROUPED
        self._grouped = self._num_groups * self._GROUPED
        self._rest = np.arange(self._grouped, vocab_size)
        self._passed = np.zeros(self._grouped, dtype=np.bool_)

    def winner(self, key: int, logits: NDArray[Any], temperature: float, likeliest: int) -> int:
        """Token id with the largest p / E; the lower id if two are equal.

        logits: `[vocab]`, float32 or float64, the largest one finite and at `likeliest`.
        """
        largest = float(logits[likeliest])
        ratio = float(exponential_numpy(key, np.array([likeliest]))[0])
        by_group = (self._GROUPED, self._num_groups)
        tops = logits[: self._grouped].reshape(by_group).max(axis=0).astype(np.float64)
        # v < r * p in units of 2**-32. Four units of slack cover the rounding on both sides.
        bound = np.exp((tops - largest) / temperature) * (ratio * (1 + 1e-9) * 2.0**32) + 4
        least = np.maximum(2.0**32 - bound, 0).astype(np.uint32)
        bits = self._bits(key)[: self._grouped].reshape(by_group)
        np.greater_equal(bits, least, out=self._passed.reshape(by_group))
        # Eight flags are looked at as one word, most of which are zero.
        words = np.flatnonzero(self._passed.view(np.uint64))
        ids = (words[:, None] * 8 + np.arange(8)).ravel()
        ids = np.concatenate([ids[self._passed[ids]], self._rest])
        weights = np.exp((logits[ids].astype(np.float64) - largest) / temperature)
        return int(ids[(weights / exponential_numpy(key, ids)).argmax()])

    def _bits(self, key: int) -> NDArray[np.uint32]:
        """The 32 random bits of every token, in scratch memory."""
        z, shifted = self._pairs, self._shifted
        np.add(self._steps, np.uint64(key), out=z)
        for shift, factor in ((30, _MUL1), (27, _MUL2)):
            np.right_shift(z, np.uint64(shift), out=shifted)
            np.bitwise_xor(z, shifted, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        # Little-endian order puts the lower half, the even token's, first.
        return z.astype("<u8", copy=False).view("<u4")
