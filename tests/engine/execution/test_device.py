"""The device's executor gives the tokens of the plain one, with and without graphs."""

import pytest
from device_graphs import FakeRecorder, tiny_on_device

from engine.build import BuiltEngine, assemble
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.execution.device import DeviceExecutor
from engine.execution.graphs import DecodeGraphs, GraphBuckets
from engine.request import Request, SamplingParams
from engine.sampling.batched import BatchedSampler
from engine.text.text_model import load_text

PAGE = 16


@pytest.fixture(scope="module")
def model():
    return tiny_on_device()


def build(
    model, *, on_device=False, rows=None, overlap=False
) -> tuple[BuiltEngine, DecodeGraphs | None]:
    config = EngineConfig(
        model=ModelConfig(name="m", source="tiny"),
        max_context_tokens=256,
        block_tokens=PAGE,
        num_blocks=40,  # room for a few: others wait or are preempted
        scheduler=SchedulerConfig(max_chunk_tokens=7, overlap=overlap),
    )
    built = assemble(config, model, load_text("tiny").tokenizer)
    graphs = None
    if on_device:
        if rows is not None:
            graphs = DecodeGraphs(model, built.pool, GraphBuckets(rows, (4, 16)), FakeRecorder())
            graphs.record()
        sampler = BatchedSampler(model.vocab_size, model.eos_token_ids)
        engine = built.engine
        assert engine._pipeline is not None
        executor = DeviceExecutor(model, built.pool, sampler, graphs)
        engine._executor = engine._pipeline._executor = executor
    return built, graphs


def drive(built):
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_ids=tuple(32 + (7 * i + j) % 90 for j in range(3 + 9 * i)),
            params=SamplingParams(
                max_tokens=12 + i,
                temperature=float(i % 3 != 0),
                seed=i,
                top_p=0.9 if i % 4 == 3 else 1.0,
                frequency_penalty=0.5 if i == 4 else 0.0,
            ),
        )
        for i in range(8)
    ]
    for request in requests:
        built.engine.submit(request)
    tokens = {request.request_id: [] for request in requests}
    while (step := built.engine.step()) is not None:
        built.engine.check()
        for output in step.outputs:
            tokens[output.request_id].append(output.token.token_id)
    assert built.engine.stats().num_held_blocks == 0
    return tokens


@pytest.mark.parametrize(
    ("rows", "overlap"),
    [(None, False), ((1, 2, 4, 8), False), ((1, 2), False), ((1, 2, 4, 8), True)],
    ids=["eager", "graphs", "too small", "overlap"],
)
def test_whole_conversations_get_the_tokens_of_the_plain_executor(model, rows, overlap):
    want = drive(build(model)[0])
    built, graphs = build(model, on_device=True, rows=rows, overlap=overlap)
    assert drive(built) == want
    assert (built.engine.stats().num_steps_ahead > 0) is overlap
    assert (graphs is None) == (rows is None)
    if graphs is not None:
        assert graphs.num_replays > 0
