"""What an operator changes while requests run: settings in place, models anew, models more."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI
from serving import (
    BLOCK_TOKENS,
    MODELS,
    NUM_BLOCKS,
    SLOTS,
    Cluster,
    locally,
    model_application,
    wait_for,
)

pytestmark = pytest.mark.cluster


@pytest.fixture
def config(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The configuration to change; the one before is in force again afterwards."""
    before = cluster.config
    cluster.config = copy.deepcopy(before)
    yield cluster.config
    cluster.config = before
    code, _, errors = cluster.up()
    assert code == 0, errors
    cluster.settled()


def deployment(config: dict[str, Any], app: str, name: str) -> dict[str, Any]:
    (application,) = (a for a in config["applications"] if a["name"] == app)
    (found,) = (d for d in application["deployments"] if d["name"] == name)
    return found


def apply(cluster: Cluster) -> str:
    code, ready, errors = cluster.up()
    assert code == 0, errors
    assert ready["updated"]
    return errors


def test_the_gateway_did_not_have_to_wait_for_its_models(cluster: Cluster):
    # A replica that fails to start is tried again, which the command shows.
    assert "Gateway: " not in cluster.progress


def test_the_command_told_what_the_memory_of_every_pool_is_used_for(cluster: Cluster):
    code, now, errors = cluster.command("status")
    assert code == 0, errors
    for app in MODELS:
        pools = now["applications"][app]["deployments"]
        assert set(cluster.ready["memory"][app]) == {"Decode", "Prefill"}
        for pool, told in cluster.ready["memory"][app].items():
            assert len(told) == pools[pool]["target_replicas"]
            for plan in told:
                assert plan["kv_tokens"] == (NUM_BLOCKS - 1) * BLOCK_TOKENS
                assert plan["largest_batch"] == plan["kv_tokens"] // min(
                    1024, plan["context_tokens"]
                )


def test_settings_change_in_place(cluster: Cluster, config: dict[str, Any]):
    pids = cluster.all_pids()
    prompt = [random.Random(8).randrange(32, 127) for _ in range(200)]
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        client.completions.create(model="tiny", prompt=prompt, max_tokens=11)
        gateway = deployment(config, "gateway", "Gateway")["user_config"]
        gateway["revision"] += 1
        gateway["limits"] = {"max_output_tokens": 10}
        for name in ("Prefill", "Decode"):
            deployment(config, "tiny", name)["user_config"] |= {
                "max_running_requests": SLOTS - 5,
                "local_prefill_tokens": 1000,
            }
        apply(cluster)
        with pytest.raises(openai.BadRequestError, match=r"max_tokens=11.*10") as refused:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=11)
        assert refused.value.param == "max_tokens"
        free = wait_for(lambda: set(cluster.queue("tiny")["free_slots"].values()) - {SLOTS})
        assert free == {SLOTS - 5}
        before = cluster.counted("tiny", "decisions")
        prompt.reverse()
        client.completions.create(model="tiny", prompt=prompt, max_tokens=10)
        after = cluster.counted("tiny", "decisions")
        assert after.get("local/short", 0) == before.get("local/short", 0) + 1
        assert after["disaggregated/"] == before["disaggregated/"]
    assert cluster.all_pids() == pids


@pytest.mark.parametrize("app", ["tiny", "gateway"])
async def test_a_redeploy_under_load_drops_no_request(cluster: Cluster, app: str):
    rng = random.Random(12)
    asked = [
        {
            "prompt": [rng.randrange(32, 127) for _ in range(length)],
            "max_tokens": tokens,
            "seed": rng.getrandbits(63),
        }
        for length, tokens in ((5, 40), (60, 40), (150, 30), (20, 1500))
    ]
    expected = {
        model: [locally(model, temperature=1.0, ignore_eos=True, **one)[0].text for one in asked]
        for model in MODELS
    }
    served = {model: 0 for model in MODELS}

    async def ask(client: AsyncOpenAI, model: str, which: int) -> None:
        text = ""
        async for chunk in await client.completions.create(
            model=model, stream=True, extra_body={"ignore_eos": True}, **asked[which]
        ):
            text += chunk.choices[0].text
        assert text == expected[model][which]
        served[model] += 1

    pids = cluster.all_pids()
    deployed = asyncio.Event()

    async def load(client: AsyncOpenAI) -> list[asyncio.Task[None]]:
        tasks: list[asyncio.Task[None]] = []
        while not deployed.is_set() or len(tasks) < 60:
            which = 3 if len(tasks) % 10 == 0 else len(tasks) % 3
            model = MODELS[len(tasks) // 2 % 2]
            tasks.append(asyncio.create_task(ask(client, model, which)))
            await asyncio.sleep(0.1)
            while sum(not task.done() for task in tasks) >= 12:  # the machine may be slow
                await asyncio.sleep(0.05)
        return tasks

    # Another number of either needs new processes. It stays: the next test does not mind.
    if app == "tiny":
        (tiny,) = (a for a in cluster.config["applications"] if a["name"] == "tiny")
        tiny["args"]["num_blocks"] += 50
    else:
        gateway = deployment(cluster.config, "gateway", "Gateway")
        gateway["ray_actor_options"]["num_cpus"] = 0.2
    async with AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600.0
    ) as client:
        loading = asyncio.create_task(load(client))
        await asyncio.sleep(1.0)
        try:
            await asyncio.to_thread(apply, cluster)
            # What drains still has work: go on until the old processes are gone.
            old = [pid for at, there in pids.items() if at[0] == app for pid in there.values()]
            await asyncio.to_thread(wait_for, lambda: not any(map(psutil.pid_exists, old)))
        finally:
            deployed.set()
            tasks = await loading
        await asyncio.gather(*tasks)
    assert sum(served.values()) == len(tasks) >= 60
    await asyncio.to_thread(cluster.settled)
    if app == "tiny":
        # The old replicas were let finish: what moves elsewhere comes back longer than it was asked
        # for. One may be caught between Serve's decision and its first `hold`.
        came = [
            submit["events"][0]["num_tokens"]
            for replica in cluster.pids("tiny", "Decode")
            for submit in cluster.stats("tiny", "Decode", replica)["log"]
        ]
        assert len(came) > 5
        assert sum(tokens not in (5, 60, 150, 20) for tokens in came) <= 1
    now = cluster.all_pids()
    for at, before in pids.items():
        if at[0] == app:
            assert not set(before) & set(now[at])
        else:
            assert now[at] == before


def test_a_model_comes_and_goes(cluster: Cluster, config: dict[str, Any]):
    gateway_pids = cluster.pids("gateway", "Gateway")
    config["applications"].append(model_application("third", "fake", prefills=0, decodes=1))
    routes = deployment(config, "gateway", "Gateway")["user_config"]
    routes["revision"] += 1
    routes["models"].append({"name": "third", "app": "third"})
    apply(cluster)
    prompt = [70] * 50
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        wait_for(lambda: "third" in [model.id for model in client.models.list()])
        asked = {"prompt": prompt, "max_tokens": 10, "seed": 1}
        answer = client.completions.create(model="third", temperature=1.0, **asked)
        (expected,) = locally("fake", temperature=1.0, **asked)
        assert answer.choices[0].text == expected.text
        assert cluster.counted("third", "decisions") == {"local/no_prefill_replica": 1}
        cluster.queue("third")
        config["applications"].pop()
        routes["models"].pop()
        apply(cluster)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="third", **asked)
    assert cluster.pids("gateway", "Gateway") == gateway_pids
    wait_for(lambda: not cluster.queue_exists("third"))
