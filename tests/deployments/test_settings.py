"""`args` of a model, as the engine gets them."""

import pytest
from pydantic import ValidationError

from deployments.settings import ModelArgs
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
