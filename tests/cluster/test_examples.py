"""The example configurations for GPUs: what `tailrace up` would say of them, and what they take."""

from importlib.resources import files
from pathlib import Path

import pytest

from cluster.config import load
from deployments.app import _placement
from deployments.settings import ModelArgs, PoolSettings, rank_bundles
from engine.memory import PoolSize, free_on_devices

LLAMA_70B_TOKEN_BYTES = 2 * 80 * 8 * 128 * 2
"""Keys and values, layers, heads, numbers of a head, bfloat16."""

EXAMPLES = Path(str(files("cluster"))) / "examples"


def gpus_of(application):
    """GPUs that all replicas of a model take together."""
    args = ModelArgs.model_validate(application["args"])
    total = 0
    for deployment in application["deployments"]:
        own = args.of_prefill() if deployment["name"] == "Prefill" else args
        each = sum(bundle.get("GPU", 0) for bundle in rank_bundles(own.num_ranks, "gpu"))
        each += deployment.get("ray_actor_options", {}).get("num_gpus", 0)
        total += each * deployment["num_replicas"]
    return total


def test_there_is_one_for_each_size():
    assert sorted(p.name for p in EXAMPLES.glob("*.yaml")) == [
        "gpus-1.yaml",
        "gpus-16.yaml",
        "gpus-2.yaml",
        "gpus-8.yaml",
    ]


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_an_example_is_sound_and_takes_as_many_gpus_as_it_says(count):
    config = load(EXAMPLES / f"gpus-{count}.yaml")
    _, served = config.data["applications"]
    assert config.models == {served["name"]}
    assert gpus_of(served) == count
    pools = {deployment["name"] for deployment in served["deployments"]}
    assert pools == ({"Decode"} if count == 1 else {"Prefill", "Decode"})
    args = ModelArgs.model_validate(served["args"])
    for deployment in served["deployments"]:
        settings = PoolSettings.parse(deployment["user_config"])
        engine = args.engine_config(settings.scheduler())
        assert engine.model.accelerator == "gpu"
        assert engine.resolved_reuse_tokens == 32
        # A replica with ranks takes no GPU itself: they are in its placement group.
        own = args.of_prefill() if deployment["name"] == "Prefill" else args
        asked = deployment.get("ray_actor_options", {}).get("num_gpus", 0)
        assert asked == (1 if own.num_ranks == 1 else 0)


@pytest.mark.parametrize("count", [8, 16])
def test_ranks_measure_their_devices_so_a_pool_needs_no_size_of_its_own(count):
    _, served = load(EXAMPLES / f"gpus-{count}.yaml").data["applications"]
    args = ModelArgs.model_validate(served["args"])
    for deployment in served["deployments"]:
        own = args.of_prefill() if deployment["name"] == "Prefill" else args
        engine = own.engine_config(PoolSettings.parse(deployment["user_config"]).scheduler())
        token_bytes = LLAMA_70B_TOKEN_BYTES // own.num_ranks
        free = free_on_devices([(20 * 10**9, token_bytes)] * own.num_ranks)
        size = PoolSize(
            num_blocks=engine.num_blocks,
            kv_memory_bytes=engine.kv_memory_bytes,
            kv_memory_fraction=engine.kv_memory_fraction,
            block_tokens=engine.block_tokens,
            useful_tokens=engine.scheduler.max_running_requests * engine.max_context_tokens,
        )
        # Nine tenths of the 20 GB of each.
        blocks = size.blocks(LLAMA_70B_TOKEN_BYTES, free)
        assert blocks == int(own.num_ranks * 18 * 10**9) // (256 * LLAMA_70B_TOKEN_BYTES)


def test_ranks_get_a_gpu_each_in_the_placement_group_of_their_replica():
    args = load(EXAMPLES / "gpus-16.yaml").data["applications"][1]["args"]
    bundles = _placement(ModelArgs.model_validate(args))["placement_group_bundles"]
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1, 1, 1, 1]
