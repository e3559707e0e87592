"""A model without weights whose KV is the token id, for tests and demonstrations of the machinery.

It reads the whole history of every row it answers back from the pool, through the block table, and
derives the logits from a hash of what it found. KV that is wrong, missing, stale or misplaced
(another block, position, layer or head, K for V) therefore changes tokens. Page size, chunks,
batches and transfer must not.
"""

from __future__ import annotations

import string
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import StepContext
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.text.text_model import BUILTIN_CONTEXT_TOKENS
from engine.text.tokenizer import BYTE_EOS_ID, BYTE_VOCAB_SIZE

_LAYERS, _HEADS, _DIM = 2, 2, 1
_ELEMENTS = _LAYERS * _HEADS * _DIM

_EOS_WEIGHT = 1 / 128
"""An answer ends after about 128 tokens."""


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection whose every bit counts."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def counter_bits(stream: int, count: int) -> NDArray[np.uint64]:
    """`count` pseudorandom 64-bit words, the same on every machine."""
    counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix64(counter + mix64(np.array([stream], dtype=np.uint64)))


def _log_frequencies() -> NDArray[np.float64]:
    """Log-probabilities that make an answer look like text, most of it lower case."""
    weights = np.full(BYTE_VOCAB_SIZE, 1e-13)
    for characters, share in (
        (string.digits, 0.02),
        (string.ascii_uppercase, 0.03),
        (".,;:!?'\"-()\n", 0.04),
    ):
        for character in characters:
            weights[ord(character)] = share / len(characters)
    # Per thousand, in the order of the alphabet.
    english = (82, 15, 28, 43, 127, 22, 20, 61, 70, 2, 8, 40, 24, 67, 75, 19, 1, 60, 63, 91, 28, 10,
               24, 2, 20, 1)  # fmt: skip
    for letter, share in zip(string.ascii_lowercase, english, strict=True):
        weights[ord(letter)] = 0.73e-3 * share
    weights[ord(" ")] = 0.18
    weights[BYTE_EOS_ID] = _EOS_WEIGHT
    return np.log(weights / weights.sum())


class FakeModel:
    """Implements `Model` with the byte vocabulary, in float64, on the CPU.

    Logits are `log p(token)` plus Gumbel noise keyed by (history, token): greedy tokens are draws
    of p, and at temperature 1 there is a real distribution to sample from.
    """

    layout = KVLayout(
        num_layers=_LAYERS,
        num_kv_heads=_HEADS,
        head_dim=_DIM,
        dtype="float64",
        fingerprint=sha256(b"tailrace fake model, 1").hexdigest(),
    )
    dtype = "float64"
    weight_bytes = 0
    vocab_size = BYTE_VOCAB_SIZE
    max_context_tokens = BUILTIN_CONTEXT_TOKENS
    eos_token_ids: tuple[int, ...] = (BYTE_EOS_ID,)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._log_frequencies = _log_frequencies()
        # An odd weight for each position and element of K and V: the hash, a sum of products modulo
        # 2**64, notices any single change and any exchange of two values.
        weights = counter_bits(1, BUILTIN_CONTEXT_TOKENS * 2 * _ELEMENTS) | np.uint64(1)
        self._weights: NDArray[np.uint64] = np.reshape(weights, (-1, _LAYERS, 2, _HEADS, _DIM))
        self._weights_by_page: dict[int, NDArray[np.uint64]] = {}
        self._token_keys = counter_bits(2, BYTE_VOCAB_SIZE)
        self._elements = torch.arange(_ELEMENTS, dtype=torch.float64).view(_LAYERS, _HEADS, _DIM)

    def forward(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        """See `Model.forward`."""
        block, offset = step.slots // pool.block_tokens, step.slots % pool.block_tokens
        for layer in range(_LAYERS):
            elements = self._elements[layer]  # [heads, dim]
            # Integers far below 2**53 that tell token, layer, head and dim; V also the position.
            keys = ids.double()[:, None, None] + self.vocab_size * elements
            values = keys + 2.0**20 * (positions + 1).double()[:, None, None]
            pool.keys(layer)[block, offset] = keys
            pool.values(layer)[block, offset] = values
        rows = step.last.numpy()
        if not len(rows):
            return torch.empty((0, self.vocab_size), dtype=torch.float64)
        requests = np.searchsorted(step.cu_q.numpy(), rows, side="right") - 1
        lengths = positions.numpy()[rows] + 1
        table = step.block_table.numpy()[requests]
        digests = self._digests(pool, table, lengths)  # [sampled]
        bits = mix64(digests[:, None] ^ self._token_keys)  # [sampled, vocab]
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return torch.as_tensor(self._log_frequencies - np.log(-np.log(uniform)))

    def _digests(
        self, pool: KVPool, table: NDArray[Any], lengths: NDArray[Any]
    ) -> NDArray[np.uint64]:
        """Hash of the first `lengths[r]` tokens found through `table[r]`, `[rows]`."""
        page = pool.block_tokens
        columns = -(-int(lengths.max()) // page)
        column = np.arange(columns)
        used = column * page < lengths[:, None]
        blocks = np.where(used, table[:, :columns], 0)
        # The bits of the floats, so that NaN counts like any other value. [row, column, layer, K or
        # V, token of the block, head, dim]
        pages: NDArray[np.uint64] = pool.data.view(torch.uint64).numpy()
        found = pages[blocks]
        position = column[:, None] * page + np.arange(page)
        stale = position >= lengths[:, None, None]
        np.moveaxis(found, 4, 2)[stale] = 0
        found ^= found >> np.uint64(32)  # small integers fill only the upper half of a float64
        weights = self._paged_weights(page)[:columns]
        digests = np.einsum("rn,n->r", np.reshape(found, (len(lengths), -1)), weights.ravel())
        return mix64(digests + lengths.astype(np.uint64))

    def _paged_weights(self, page: int) -> NDArray[np.uint64]:
        """`[columns, layers, 2, page, heads, dim]`, as the pool lays a block out."""
        paged = self._weights_by_page.get(page)
        if paged is None:
            columns = -(-self.max_context_tokens // page)
            flat = np.zeros((columns * page, _LAYERS, 2, _HEADS, _DIM), dtype=np.uint64)
            flat[: self.max_context_tokens] = self._weights
            by_column = np.reshape(flat, (columns, page, _LAYERS, 2, _HEADS, _DIM))
            paged = np.ascontiguousarray(np.moveaxis(by_column, 1, 3))
            self._weights_by_page[page] = paged
        return paged
