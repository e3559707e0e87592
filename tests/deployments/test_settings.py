"""`args` of a model, as the engine gets them."""

import pytest
from pydantic import ValidationError

from deployments.app import model
from deployments.settings import ModelArgs, PoolSettings
from engine.config import SchedulerConfig
from engine.errors import ConfigError


def engine_model(**args):
    return ModelArgs(name="m", source="tiny", **args).engine_config(SchedulerConfig()).model


def test_weights_are_kept_as_stored_unless_told_otherwise():
    assert engine_model().quantisation == "keep"
    model = engine_model(quantisation="int4", quantisation_group=64)
    assert (model.quantisation, model.quantisation_group) == ("int4", 64)


@pytest.mark.parametrize(
    "args", [{"quantisation": "int3"}, {"quantisation": "int8", "quantisation_group": 48}]
)
def test_ways_to_quantise_that_there_are_not_are_refused(args):
    with pytest.raises(ValidationError, match="quantisation"):
        ModelArgs(name="m", source="tiny", **args)


def test_a_group_without_rounding_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"quantisation_group=64 .* leave it out"):
        engine_model(quantisation_group=64)


def test_prefill_takes_sizes_of_its_own():
    args = ModelArgs(
        name="m", source="tiny", tensor_parallel=4, pipeline_parallel=2, prefill_tensor_parallel=2
    )
    assert (args.num_ranks, args.of_prefill().num_ranks) == (8, 4)
    config = args.of_prefill().engine_config(SchedulerConfig())
    assert (config.tensor_parallel, config.pipeline_parallel) == (2, 2)
    assert ModelArgs(name="m", source="tiny").of_prefill().num_ranks == 1


@pytest.mark.parametrize(("prefill", "kv_reads"), [(True, True), (False, False)])
def test_ranks_get_ready_for_agents_where_kv_is_read(prefill, kv_reads):
    args = ModelArgs(name="m", source="tiny", tensor_parallel=2, transport="nixl", prefill=prefill)
    assert args.engine_config(SchedulerConfig()).kv_reads is kv_reads
    linked = args.model_copy(update={"transport": "link"})
    assert linked.engine_config(SchedulerConfig()).kv_reads is False


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"source": "fake"}, "source='fake' has no parts"),
        ({"backend": "native"}, "backend='native' computes on one rank"),
    ],
)
@pytest.mark.parametrize("ranks", ["pipeline_parallel", "prefill_tensor_parallel"])
def test_what_ranks_cannot_do_is_refused(args, said, ranks):
    with pytest.raises(ValidationError, match=said):
        ModelArgs(**{"name": "m", "source": "tiny", ranks: 2, **args})


def test_a_replica_with_ranks_gets_a_placement_group_of_its_own_size():
    args = ModelArgs(name="m", source="tiny", tensor_parallel=2, prefill_pipeline_parallel=3)
    root = model(args)._bound_deployment
    decode = root.init_args[0]._bound_deployment
    prefill = decode.init_args[1]._bound_deployment
    assert root._replica_config.placement_group_bundles is None
    found = [
        (d._replica_config.placement_group_bundles, d._replica_config.placement_group_strategy)
        for d in (decode, prefill)
    ]
    assert found == [([{"CPU": 0.5}] * 3, "STRICT_PACK"), ([{"CPU": 0.5}] * 7, "PACK")]
    assert prefill.init_args[0]["pipeline_parallel"] == 3


def test_a_replica_that_computes_itself_has_no_placement_group():
    decode = model(ModelArgs(name="m", source="tiny"))._bound_deployment.init_args[0]
    assert decode._bound_deployment._replica_config.placement_group_bundles is None


@pytest.mark.parametrize(
    ("args", "block_tokens"),
    [
        ({}, 16),
        ({"accelerator": "gpu"}, 256),
        ({"accelerator": "gpu", "block_tokens": 64}, 64),
    ],
)
def test_blocks_are_as_large_as_the_accelerator_wants_them(args, block_tokens):
    made = ModelArgs(name="m", source="tiny", **args)
    assert made.block_tokens == block_tokens
    assert ModelArgs(**made.of_prefill().model_dump()).block_tokens == block_tokens


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"reuse_tokens": 24, "block_tokens": 64}, "reuse_tokens=24: must divide block_tokens=64"),
        ({"kv_memory_fraction": 0.5, "kv_memory_bytes": 9}, "kv_memory_bytes=9: the pool has one"),
        ({"kv_memory_fraction": 0.5, "num_blocks": 9}, "num_blocks=9: the pool has one size"),
    ],
)
def test_sizes_that_contradict_are_refused_before_a_replica_starts(args, said):
    with pytest.raises(ValidationError, match=said):
        ModelArgs(name="m", source="tiny", **args)


def test_overlap_reaches_the_engine_and_is_off_unless_it_is_asked_for():
    assert PoolSettings.parse({"overlap": True}).scheduler().overlap
    assert not PoolSettings.parse({}).scheduler().overlap
    with pytest.raises(ConfigError, match="overlap='auto'"):
        PoolSettings.parse({"overlap": "auto"})
