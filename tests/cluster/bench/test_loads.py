from __future__ import annotations

import asyncio
import random

import pytest
from virtual_time import in_virtual_time

from cluster.bench.client import StreamResult
from cluster.bench.loads import Ask, arrivals, at_times, closed_loop, poisson_times


class Recorder:
    """A target whose answers take two turns of the loop."""

    def __init__(self) -> None:
        self.warmed: list[int] = []
        self.running = 0
        self.most = 0
        self.order: list[int] = []
        self.started_s: dict[int, float] = {}

    async def warm(self, count: int) -> None:
        self.warmed.append(count)

    async def ask(self, ask: Ask) -> StreamResult:
        self.running += 1
        self.most = max(self.most, self.running)
        self.order.append(ask.max_tokens)
        self.started_s[ask.max_tokens] = asyncio.get_running_loop().time()
        for _ in range(2 + ask.max_tokens % 3):
            await asyncio.sleep(0)
        self.running -= 1
        return StreamResult(0.0, text=str(ask.max_tokens))


ASKS = [Ask(max_tokens=i) for i in range(10)]


@in_virtual_time
async def test_a_closed_loop_never_has_more_under_way_than_it_may():
    target = Recorder()
    results = await closed_loop(target, ASKS, 3)
    assert [result.text for result in results] == [str(i) for i in range(10)]
    assert target.most == 3
    assert target.warmed == [3]
    assert target.order == list(range(10))


@in_virtual_time
async def test_a_closed_loop_of_one_asks_one_after_the_other():
    target = Recorder()
    await closed_loop(target, ASKS, 1)
    assert target.most == 1


@in_virtual_time
async def test_a_burst_has_everyone_under_way_at_once():
    target = Recorder()
    results = await arrivals(target, ASKS, 0.0)
    assert [result.text for result in results] == [str(i) for i in range(10)]
    assert target.most == 10
    assert target.warmed == [10]


@in_virtual_time
async def test_spread_arrivals_keep_their_order_and_their_distance():
    target = Recorder()
    await arrivals(target, ASKS, 0.1)
    assert target.order == list(range(10))
    first_s = target.started_s[0]
    assert [target.started_s[i] - first_s for i in range(10)] == pytest.approx(
        [i * 0.01 for i in range(10)]
    )


@in_virtual_time
async def test_an_open_loop_sends_each_at_its_time_in_whatever_order_they_are_given():
    target = Recorder()
    results = await at_times(target, ASKS[:3], [0.04, 0.0, 0.02])
    assert target.order == [1, 2, 0]
    assert [result.text for result in results] == ["0", "1", "2"]
    assert target.started_s[0] - target.started_s[1] == pytest.approx(0.04)
    assert target.started_s[2] - target.started_s[1] == pytest.approx(0.02)


def test_poisson_arrivals_are_in_order_within_their_time_and_as_many_as_the_rate_says():
    times = poisson_times(50.0, 100.0, random.Random(3))
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 100.0
    assert abs(len(times) - 5000) < 4 * 5000**0.5
    assert times == poisson_times(50.0, 100.0, random.Random(3))
