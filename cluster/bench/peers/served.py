"""The three figures of `bench engine`, and two of open traffic, of any server of completions."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import psutil

from cluster.bench.engine_worker import DECODE_PROMPT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS
from cluster.bench.loads import Ask, poisson_times
from cluster.bench.summary import percentile
from cluster.bench.worker import Load, Worker
from cluster.errors import ClusterError

TRAFFIC_PROMPT, TRAFFIC_TOKENS = 256, 64
TRAFFIC_CALLERS = 32
_PROMPTS = 7
_FIRST_TEXT_ID = 1000
"""Ids below are control tokens and single bytes in every vocabulary here."""


class ServedBench:
    """Asks one server. Prompts are random token ids: no cache has seen them."""

    def __init__(self, url: str, model: str, vocab: int, rng: random.Random) -> None:
        """Raises ClusterError where nobody answers."""
        self._worker = Worker()
        self._model, self._vocab, self._rng = model, vocab, rng
        # llama.cpp's server ends connections that it has answered on without `connection: close`.
        self._worker.server(url, resend=True)

    def __enter__(self) -> ServedBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    @property
    def process(self) -> psutil.Process:
        """The one that asks."""
        return psutil.Process(self._worker.pid)

    def warm(self) -> None:
        """What the first requests pay for, such as compiling, is nobody's figure."""
        self._closed(1, PREFILL_TOKENS, 1, 1)
        self._closed(16, DECODE_PROMPT_TOKENS, 16, 16)

    def figures(self) -> dict[str, float]:
        """Tokens a second, as the client sees them."""
        # One prompt takes a third of a second: any other process's moment would be the figure.
        prompts = [self._closed(1, PREFILL_TOKENS, 1, 1).wall_s for _ in range(_PROMPTS)]
        out = {"prefill_512_tok_s": PREFILL_TOKENS / statistics.median(prompts)}
        for batch in (1, 16):
            load = self._closed(batch, DECODE_PROMPT_TOKENS, DECODE_TOKENS, batch)
            out[f"decode_{batch}_tok_s"] = decode_rate(load.results)
        return out

    def capacity(self, requests: int) -> float:
        """Requests of 256 tokens in and 64 out a second that it finishes at most."""
        load = self._closed(requests, TRAFFIC_PROMPT, TRAFFIC_TOKENS, TRAFFIC_CALLERS)
        return requests / load.wall_s

    def itl_p99_s(self, rate: float, over_s: float) -> float:
        """99th percentile of the time between a stream's tokens at `rate` such requests a
        second."""
        times = poisson_times(rate, over_s, self._rng)
        asks = [self._make(TRAFFIC_PROMPT, TRAFFIC_TOKENS) for _ in times]
        load = self._worker.at_times("server", asks, times)
        gaps = [
            later - earlier
            for result in load.results
            for earlier, later in zip(result["arrivals_s"], result["arrivals_s"][1:], strict=False)
        ]
        return percentile(gaps, 99)

    def _closed(self, count: int, prompt: int, tokens: int, callers: int) -> Load:
        asks = [self._make(prompt, tokens) for _ in range(count)]
        return self._worker.closed("server", asks, callers)

    def _make(self, prompt: int, tokens: int) -> Ask:
        ids = tuple(self._rng.randrange(_FIRST_TEXT_ID, self._vocab) for _ in range(prompt))
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(prompt_ids=ids, body=body, max_tokens=tokens)


def decode_rate(results: Sequence[dict[str, Any]]) -> float:
    """Tokens a second behind the moment at which every stream has its first.

    A server may put several tokens into one piece of text, or none: the share of the pieces that
    came later is taken of the tokens that `usage` tells. Raises ClusterError where all text came at
    once, which tells nothing.
    """
    begin = max(result["arrivals_s"][0] for result in results)
    end = max(result["arrivals_s"][-1] for result in results)
    if end <= begin:
        raise ClusterError("all of the answers' text was read at once: this machine is too busy")
    tokens = 0.0
    for result in results:
        arrivals = result["arrivals_s"]
        later = sum(at > begin for at in arrivals)
        # One stream's first piece is its first token; the others are behind it.
        tokens += (result["completion_tokens"] - 1) * later / max(1, len(arrivals) - 1)
    return tokens / (end - begin)
