"""What an engine refuses by its own configuration, whoever asks."""

from __future__ import annotations

import pytest

from engine.build import assemble
from engine.config import EngineConfig, ModelConfig
from engine.errors import RequestError
from engine.models.load import load_model
from engine.request import FinishReason, Request, SamplingParams
from engine.text.text_model import load_text


def test_more_output_than_the_model_gives_is_refused():
    config = EngineConfig(
        model=ModelConfig(name="m", source="fake"),
        num_blocks=50,
        block_tokens=8,
        max_context_tokens=256,
        max_output_tokens=5,
    )
    engine = assemble(config, load_model(config.model), load_text("fake").tokenizer).engine

    def ask(max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        engine.submit(Request(request_id="r", prompt_ids=(65, 66), params=params))

    with pytest.raises(RequestError, match="max_tokens=6: this model gives at most 5") as refused:
        ask(6)
    assert refused.value.param == "max_tokens"
    ask(5)
    outputs = []
    while (step := engine.step()) is not None:
        outputs += step.outputs
    assert [output.finish for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
