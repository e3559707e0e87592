"""Sampling on a device: rows without special wishes are drawn together, in a few launches.

Most rows are greedy or draw from the whole vocabulary at a temperature. Row by row, as the sampler
does it, each would cost a dozen launches and wait for the device twice. Here they are computed at
once and all results come back in one copy. Rows that edit logits, cut the vocabulary or want
log-probabilities go the sampler's way.

A token is the same as the sampler's: the noise has the same bits, and its arithmetic is float64.
"""

# Torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import RequestId, SampledToken
from engine.sampling.noise import noise_bits, noise_key, signed
from engine.sampling.processors import keeps_everything, top_logprobs
from engine.sampling.sampler import Sampler, UnusableLogits

_ELEMENTS_AT_ONCE = 1 << 23
"""Logits raced together: bounds the scratch memory to about half a gigabyte."""


class BatchedSampler(Sampler):
    """A `Sampler` for logits on a device. On a CPU it works too, more slowly than its base."""

    def sample(
        self, logits: Tensor, request_ids: Sequence[RequestId], positions: Sequence[int]
    ) -> list[SampledToken]:
        """See `Sampler.sample`."""
        rows, width = logits.shape
        assert width == self._vocab_size, f"{width} logits for {self._vocab_size} tokens"
        assert rows == len(request_ids) == len(positions), "one request and position a row"
        if rows == 0:
            return []
        logits = logits.detach()
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.to(torch.float32)
        entries = [self._entries[request_id] for request_id in request_ids]
        plain = [entry.params.logprobs is None and not entry.edits for entry in entries]
        racing = [
            i
            for i, entry in enumerate(entries)
            if plain[i] and not entry.greedy and keeps_everything(entry.params, self._vocab_size)
        ]
        largest = logits.amax(dim=-1)  # NaN where a row has one
        found = torch.stack([logits.argmax(dim=-1).to(torch.float64), largest.to(torch.float64)])
        if racing:
            raced = self._race_rows(
                logits,
                largest,
                racing,
                [entries[i].params.temperature for i in racing],
                [noise_key(entries[i].params.seed, positions[i]) for i in racing],
            )
            place = torch.tensor(racing, device=logits.device)
            drawn = torch.zeros_like(found[0]).index_copy_(0, place, raced.to(torch.float64))
            found = torch.cat([found, drawn[None]])
        ids, tops, *rest = fetch(found)
        drawn_ids = rest[0] if rest else ids
        raced_rows = frozenset(racing)
        sampled: list[SampledToken] = []
        for i, entry in enumerate(entries):
            if not math.isfinite(tops[i]):
                raise UnusableLogits(request_ids[i], positions[i], tops[i])
            if i in raced_rows:
                sampled.append(SampledToken(int(drawn_ids[i])))
            elif plain[i] and entry.greedy:
                sampled.append(SampledToken(int(ids[i])))
            else:
                row = logits[i]
                token_id = self._choose(entry, row, int(ids[i]), request_ids[i], positions[i])
                if entry.params.logprobs is None:
                    sampled.append(SampledToken(token_id))
                else:
                    logprob, top = top_logprobs(row, token_id, entry.params.logprobs)
                    sampled.append(SampledToken(token_id, logprob, top))
        for entry, token in zip(entries, sampled, strict=True):
            if entry.counts is not None:
                entry.counts.add(token.token_id)
        return sampled

    def _race_rows(
        self,
        logits: Tensor,
        largest: Tensor,
        rows: Sequence[int],
        temperatures: Sequence[float],
        keys: Sequence[int],
    ) -> Tensor:
        """The winner of each row's race, `[len(rows)]` int64 on the device."""
        device = logits.device
        token_ids = torch.arange(self._vocab_size, device=device)
        at_once = max(1, _ELEMENTS_AT_ONCE // self._vocab_size)
        winners: list[Tensor] = []
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            place = torch.tensor(rows[part], device=device)
            temperature = torch.tensor(temperatures[part], dtype=torch.float64, device=device)
            key = torch.tensor([signed(k) for k in keys[part]], device=device)[:, None]
            noise = -torch.log((noise_bits(key, token_ids).to(torch.float64) + 0.5) * 2.0**-32)
            below = logits[place].to(torch.float64) - largest[place].to(torch.float64)[:, None]
            winners.append(((below / temperature[:, None]).exp_() / noise).argmax(dim=-1))
        return torch.cat(winners)


def fetch(values: Tensor) -> list[list[float]]:
    """A small float64 tensor of two dimensions on the host.

    From a CUDA device by an asynchronous copy into pinned memory and a wait for that copy alone,
    so that other streams (transfers) are not waited for.
    """
    if values.device.type != "cuda":
        return values.tolist()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return host.tolist()
