"""Routes, names and replicas that change under a gateway that answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pools import alone, request, settled, until

from deployments.admission.actor import QueueActor
from deployments.admission.client import QueueClient
from deployments.gateway import models as models_module
from deployments.gateway.config import GatewayConfig
from deployments.gateway.dispatch import ModelClient
from deployments.gateway.models import ClusterModels
from deployments.holds import HoldKeeper
from engine.errors import ConfigError, EngineError, Overloaded, RequestError

SECRET = b"a secret of the tests, long enough to be one"

SAYS = {
    "source": "fake",
    "created": 1,
    "max_context_tokens": 1024,
    "max_output_tokens": None,
}


def routes(*names: str, app: str = "app") -> GatewayConfig:
    """One route named `names[0]`, the rest its aliases; none at all without a name."""
    if not names:
        return GatewayConfig.parse({})
    model = {"name": names[0], "app": app, "aliases": list(names[1:])}
    return GatewayConfig.parse({"models": [model]})


def says(cluster: Any, **changes: Any) -> None:
    """Let the running replicas tell what they serve, as Serve carries it."""
    directory = cluster.decode_directory
    directory._replicas = {r: m | SAYS | changes for r, m in directory._replicas.items()}
    directory._tell()


@pytest.fixture
async def make_models(local_cluster, monkeypatch):
    """The models of a gateway over one cluster; `connected` counts the clients made."""
    monkeypatch.setattr(models_module, "RETIRE_LOOK_S", 0.01)
    monkeypatch.setattr(models_module, "RELOAD_PAUSE_S", 0.01)
    made: list[ClusterModels] = []

    def make(cluster: Any) -> tuple[ClusterModels, list[ModelClient]]:
        clients: list[ModelClient] = []

        async def hold(replica: str, peer: str) -> str:
            return await cluster.decodes[replica].holds.hold(peer)

        def connect(app: str) -> ModelClient:
            client = ModelClient(
                "g0",
                SECRET,
                cluster.decode_directory,
                QueueClient(cluster.queue.address, SECRET, "g0"),
                HoldKeeper(hold, "g0"),
                window_tokens=16,
            )
            clients.append(client)
            return client

        made.append(ClusterModels(connect))
        return made[-1], clients

    yield make
    for models in made:
        await models.close()


async def served(models: ClusterModels, clients: list[ModelClient]) -> None:
    await until(lambda: bool(models.models()), "a served model")
    await clients[-1]._queue.wait_available(240)


async def finished(stream: Any) -> list[int]:
    tokens: list[int] = []
    async for events in stream:
        for event in events:
            tokens.extend(event.token_ids)
    await stream.aclose()
    return tokens


ONE = request(1, 5, 400, ignore_eos=True)


async def test_a_route_taken_out_lets_its_streams_end(local_cluster, make_models):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    says(cluster)
    models, clients = make_models(cluster)
    await models.apply(routes("m"))
    await served(models, clients)
    stream = await models.open("m", ONE, n=1, remaining_s=60.0)
    await models.apply(routes())
    with pytest.raises(RequestError, match="'m' does not exist here; served are: none"):
        await models.model("m")
    assert models.num_streams == 1
    assert await finished(stream) == alone("fake", ONE).tokens
    await until(lambda: not models._retiring, "the end of the client")
    await until(lambda: not cluster.decodes["d0"]._server.links, "the end of its link")


async def test_a_route_taken_out_lets_who_waits_for_a_slot_be_answered(local_cluster, make_models):
    cluster = local_cluster(prefill=False, max_running_requests=1)
    await cluster.add_decode("d0")
    says(cluster)
    models, clients = make_models(cluster)
    await models.apply(routes("m"))
    await served(models, clients)
    first = await models.open("m", ONE, n=1, remaining_s=60.0)
    two = request(2, 5)
    waits = asyncio.create_task(models.open("m", two, n=1, remaining_s=60.0))
    await until(lambda: clients[0]._queue.num_waiting == 1, "a request in the queue")
    await models.apply(routes())
    assert await finished(first) == alone("fake", ONE).tokens
    assert await finished(await waits) == alone("fake", two).tokens
    await until(lambda: not models._retiring, "the end of the client")


async def test_a_route_that_returns_finds_its_streams_undisturbed(local_cluster, make_models):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    says(cluster)
    models, clients = make_models(cluster)
    await models.apply(routes("m"))
    await served(models, clients)
    stream = await models.open("m", ONE, n=1, remaining_s=60.0)
    await models.apply(routes())
    await models.apply(routes("again"))
    two = request(2, 5)
    second = await models.open("again", two, n=1, remaining_s=60.0)
    assert await finished(second) == alone("fake", two).tokens
    assert await finished(stream) == alone("fake", ONE).tokens
    assert stream.migrations == 0
    assert len(clients) == 1
    assert [info.name for info in models.models()] == ["again"]


async def test_a_model_renamed_while_it_answers(local_cluster, make_models):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    says(cluster)
    models, clients = make_models(cluster)
    await models.apply(routes("old"))
    await served(models, clients)
    stream = await models.open("old", ONE, n=1, remaining_s=60.0)
    await models.apply(routes("new", "alias"))
    for name in ("new", "alias"):
        assert (await models.model(name)).name == "new"
    with pytest.raises(RequestError, match="'old' does not exist here; served are: new"):
        await models.open("old", ONE, n=1, remaining_s=60.0)
    assert await finished(stream) == alone("fake", ONE).tokens
    assert stream.migrations == 0
    assert len(clients) == 1


async def test_a_redeployed_model_has_its_new_tokenizer_and_limits(local_cluster, make_models):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    says(cluster)
    models, _ = make_models(cluster)
    await models.apply(routes("m"))
    await until(lambda: bool(models.models()), "a served model")
    before = await models.model("m")
    assert (before.root, before.max_context_tokens) == ("fake", 1024)
    says(cluster, source="tiny", max_context_tokens=64)
    await until(lambda: models.models()[0].root == "tiny", "the new model")
    after = await models.model("m")
    assert after.max_context_tokens == 64
    assert after.text is not before.text


async def test_a_model_whose_text_failed_to_load_once_is_tried_again(
    local_cluster, make_models, monkeypatch
):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    load, failures = models_module.load_text, [ConfigError("the disk is away")]

    def flaky(source: str) -> Any:
        if failures:
            raise failures.pop()
        return load(source)

    monkeypatch.setattr(models_module, "load_text", flaky)
    models, _ = make_models(cluster)
    await models.apply(routes("m"))
    with pytest.raises(Overloaded) as starting:
        await models.model("m")
    assert starting.value.code == "model_starting"
    says(cluster)
    await until(lambda: bool(models.models()), "the model")
    assert failures == []


async def test_cached_tokens_are_those_found_before_anything_was_computed(local_cluster):
    cluster = local_cluster()
    await cluster.add_prefill("p0")
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    one = request(3, 160, 60, ignore_eos=True)
    stream = await client.open(one, n=1, remaining_s=60.0)
    batches = aiter(stream)
    tokens = [t for event in await anext(batches) for t in event.token_ids]
    await cluster.add_decode("d1")
    cluster.decode_directory.drop("d0")
    await cluster.decodes.pop("d0").close()
    usage = None
    async for events in batches:
        for event in events:
            tokens.extend(event.token_ids)
            usage = event.usage or usage
    await stream.aclose()
    assert tokens == alone("fake", one).tokens
    assert stream.migrations == 1
    # The second replica found the prompt in prefill's cache: it was computed for this request.
    assert usage.cached_tokens == 0
    await settled(cluster)


async def test_a_new_queue_grants_what_waited_in_the_old_one(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=2)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    running = [
        await client.open(request(i, 5, 400, ignore_eos=True), n=1, remaining_s=60.0)
        for i in range(2)
    ]
    requests = [request(10 + i, 5) for i in range(6)]

    async def answer(one: Any) -> list[int]:
        return await finished(await client.open(one, n=1, remaining_s=60.0))

    waiting = [asyncio.create_task(answer(one)) for one in requests]
    await until(lambda: client._queue.num_waiting == 6, "six in the queue")
    old, cluster.queue = cluster.queue, QueueActor("app", SECRET, host="127.0.0.1")
    for (kept,) in (client._queue._queues._kept, decode.reporter._queues._kept):
        kept._find_address = cluster.queue.address
    await old.close()
    for stream in running:
        await stream.aclose()
    told = await asyncio.gather(*waiting)
    assert told == [alone("fake", one).tokens for one in requests]
    await settled(cluster)


def test_two_names_for_one_application_are_refused_in_favour_of_an_alias():
    with pytest.raises(EngineError, match=r"'a' and 'b' both name the application 'x'.* an alias"):
        GatewayConfig.parse({"models": [{"name": "a", "app": "x"}, {"name": "b", "app": "x"}]})
