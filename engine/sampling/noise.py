"""Stateless noise: `exponential(seed, position, token_id)`.

Sampling is the race argmax p[i] / E[i] with E[i] ~ Exp(1), which draws token i with probability
p[i]. Because E depends on nothing but (seed, position, token id), a seed gives the same text in any
batch, on any rank, after preemption, after hand-over to another replica and with any drafter. There
is no generator state to carry.

    key  = mix(mix(seed ^ DOMAIN) + (position + 1) * STRIDE)   python integers, once a row
    bits = mix(key + (token_id + 1) * GOLDEN)                  output `token_id` of splitmix64
    E    = -log(((bits >> 12) + 0.5) / 2**52)                  float64, always in (0, 37)

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014). The integer part has the same bits on every device and in both
implementations below; only the last bit of the logarithm may differ between devices.
"""

# Torch and numpy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import sys
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

_HALF_ULP = 0.5
_SCALE = 2.0**-52
_UPPER = 1 if sys.byteorder == "little" else 0


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
    bits = noise_bits(key, token_ids)
    return -torch.log((_shift_right(bits, 12).to(torch.float64) + _HALF_ULP) * _SCALE)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _shift_right(z: Tensor, n: int) -> Tensor:
    # Torch shifts int64 arithmetically; the mask makes it the logical shift the hash is defined by.
    return (z >> n) & ((1 << (64 - n)) - 1)


def noise_bits(key: int, token_ids: Tensor) -> Tensor:
    """The 64 random bits of each token as int64, on the tensor's own device."""
    z = (token_ids + 1) * _signed(_GOLDEN) + _signed(key)
    z = (z ^ _shift_right(z, 30)) * _signed(_MUL1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MUL2)
    return z ^ _shift_right(z, 31)


# On a CPU numpy's unsigned 64-bit and comparison loops cost a half to a tenth of torch's, so that
# is what runs there. The tests hold both to the same bits.


def noise_bits_numpy(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`noise_bits` for a numpy array."""
    z = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL2)
    return z ^ (z >> np.uint64(31))


def exponential_numpy(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """`exponential` for a numpy array and a key from `noise_key`."""
    high = (noise_bits_numpy(key, token_ids) >> np.uint64(12)).astype(np.float64)
    return -np.log((high + _HALF_ULP) * _SCALE)


class VocabularyRace:
    """The race over a whole vocabulary on a CPU, without a logarithm or a division for every token.

    With u = 1 - v, E = -log(1 - v) >= v, and the likeliest token already has the ratio r = E / p.
    So a token can win only if v < r * p, which the upper half of its bits nearly always denies.
    Exact noise is computed for the few that pass; the winner is that of the full race.

    Holds scratch memory: one instance serves one thread.
    """

    # Fresh arrays of this size would be mapped and faulted in anew for every row.
    _CHUNK = 16384

    def __init__(self, vocab_size: int) -> None:
        self._steps = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._bits = np.empty(self._CHUNK, dtype=np.uint64)
        self._shifted = np.empty(self._CHUNK, dtype=np.uint64)
        # Eight flags are looked at as one word; the last word may be padded with zeros.
        self._passed = np.zeros(-(-vocab_size // 8) * 8, dtype=np.bool_)

    def winner(self, key: int, weights: NDArray[Any], likeliest: int) -> int:
        """Token id with the largest weight / E; the lower id if two are equal.

        weights: `[vocab]`, float32 or float64, not negative, its largest entry at `likeliest`.
        """
        vocab_size = len(self._steps)
        top = np.array([likeliest], dtype=np.int64)
        ratio = float(exponential_numpy(key, top)[0]) / float(weights[likeliest])
        # v < r * p in units of 2**-32 of u. The bits lack the last line of `mix` (which moves them
        # by two units at most) and float32 rounds to 256 units: with 1024 units of slack nobody is
        # left out.
        need = weights * weights.dtype.type(-ratio * (1 + 1e-5) * 2.0**32)
        need += weights.dtype.type(2.0**32 - 1024)
        np.maximum(need, weights.dtype.type(0), out=need)
        for start in range(0, vocab_size, self._CHUNK):
            end = min(start + self._CHUNK, vocab_size)
            high = self._upper_bits(key, start, end)
            np.greater_equal(high, need[start:end].astype(np.uint32), out=self._passed[start:end])
        words = np.flatnonzero(self._passed.view(np.uint64))
        ids = (words[:, None] * 8 + np.arange(8)).ravel()
        ids = ids[self._passed[ids]]
        return int(ids[race_numpy(key, ids, weights[ids])])

    def _upper_bits(self, key: int, start: int, end: int) -> NDArray[np.uint32]:
        """Upper 32 bits of each token's hash, short of the last line of `mix`."""
        z, shifted = self._bits[: end - start], self._shifted[: end - start]
        np.add(self._steps[start:end], np.uint64(key), out=z)
        np.right_shift(z, np.uint64(30), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, np.uint64(_MUL1), out=z)
        np.right_shift(z, np.uint64(27), out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, np.uint64(_MUL2), out=z)
        return z.view(np.uint32)[_UPPER::2]


def race_numpy(key: int, ids: NDArray[np.int64], weights: NDArray[Any]) -> int:
    """Index into `ids` of the winner of weights / E. Equal ratios go to the earlier entry."""
    return int((weights / exponential_numpy(key, ids)).argmax())
