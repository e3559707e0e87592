"""What a GPU is asked for where there is none, and how a decoder on one is put together."""

import logging
from importlib.util import find_spec

import pytest
import torch
from device_graphs import FakeRecorder

from engine.attention import select
from engine.attention.capabilities import Device
from engine.attention.flash import FlashAttention, FlashCalls
from engine.attention.flash_twin import flash_attn_varlen_func, flash_attn_with_kvcache
from engine.build import assemble
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.execution import gpu
from engine.execution.device import DeviceExecutor
from engine.execution.pool import KVPool
from engine.models import gpu as models_gpu
from engine.models.decoder import Decoder
from engine.models.device_linear import DenseLinear, DeviceProducts
from engine.models.gpu import kept_codes
from engine.models.load import compute_dtype, load_model
from engine.models.tiny import TINY_ARCHITECTURE, tiny_tensors
from engine.request import Request, SamplingParams
from engine.text.text_model import load_text

H100 = Device(kind="cuda", compute=(9, 0), missing={}, name="H100")
OLD = Device(kind="cuda", compute=(8, 0), missing={"triton": "Triton is not installed"})

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_a_gpu_that_is_not_there_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"'gpu': (torch .* without CUDA|this process)"):
        load_model(ModelConfig(name="m", source="tiny", accelerator="gpu"))


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"quantisation": "fp8"}, "quantisation='fp8' is for GPUs: use int8 or int4, or accel"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8' is for GPUs: use int8, or accelerator: gpu"),
        ({"attention": "flash"}, "attention='flash' is for GPUs: use auto, or accelerator: gpu"),
        ({"accelerator": "gpu", "backend": "native"}, "backend='native' computes on CPUs"),
    ],
)
def test_wishes_that_do_not_go_together_are_refused(wish, reason):
    with pytest.raises(ConfigError) as refused:
        ModelConfig(name="m", source="tiny", **wish)
    assert reason in str(refused.value)


def test_the_fake_model_stays_on_the_cpu():
    with pytest.raises(ConfigError, match="the fake model is Python"):
        load_model(ModelConfig(name="m", source="fake", accelerator="gpu"))


def test_a_gpu_computes_in_bfloat16_unless_told_otherwise():
    assert compute_dtype("auto", "gpu") == torch.bfloat16
    assert compute_dtype("float32", "gpu") == torch.float32


def config(**wish):
    return ModelConfig(name="m", source="tiny", accelerator="gpu", **wish)


def test_codes_of_a_file_are_expanded_where_the_device_cannot_multiply_with_them(caplog):
    stored = {"layers.0.q": object()}
    assert kept_codes(config(), H100, stored) == stored
    assert kept_codes(config(), OLD, {}) == {}
    with caplog.at_level(logging.WARNING):
        assert kept_codes(config(), OLD, stored) == {}
    assert "needs Triton (Triton is not installed)" in caplog.text


@pytest.mark.parametrize(
    ("quantisation", "reason"),
    [("int8", "needs Triton"), ("fp8", "need compute capability 8.9")],
)
def test_codes_that_were_asked_for_are_refused_there(quantisation, reason):
    with pytest.raises(ConfigError, match=reason):
        kept_codes(config(quantisation=quantisation), OLD, {"layers.0.q": object()})


@pytest.fixture
def stand_in(monkeypatch):
    """A CPU that passes for a GPU: twins for kernels, repetition for graphs."""

    def twin(found, needs, *, window, wanted="auto"):
        assert wanted == "auto"
        calls = FlashCalls(flash_attn_varlen_func, flash_attn_with_kvcache)
        return "flash", FlashAttention(calls, window=window)

    for module in (select, gpu, models_gpu):
        monkeypatch.setattr(module, "cuda_device", lambda index=0: H100)
    monkeypatch.setattr(models_gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu, "make_attention", twin)
    monkeypatch.setattr(gpu, "CudaRecorder", FakeRecorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_executor_of_a_gpu_is_put_together_as_configured(stand_in, caplog, graphs):
    model = Decoder(
        TINY_ARCHITECTURE,
        tiny_tensors(),
        dtype=torch.float32,
        fingerprint="",
        products=DeviceProducts({}, device=torch.device("cpu"), dtype=torch.float32),
    )
    assert model.weight_bytes == sum(
        tensor.numel() * 4 for tensor in tiny_tensors().values() if tensor.dim() == 2
    )
    pool = KVPool(model.layout, 20, 256)
    with caplog.at_level(logging.INFO):
        executor = gpu.gpu_executor(
            model,
            pool,
            wanted="auto",
            graphs=graphs,
            max_running_requests=3,
            max_step_tokens=600,
            max_context_tokens=1024,
        )
    assert not pool.data[1:].any(), "what was computed to warm up lies in block 0"
    assert isinstance(executor, DeviceExecutor)
    assert isinstance(model._attention, FlashAttention)
    assert "attention on H100: flash" in caplog.text
    # 1, 2 and 3 rows, each with tables of 4 blocks: a context of 1024.
    assert ("3 decode graphs recorded" in caplog.text) == graphs


def test_a_step_that_has_no_memory_is_missed_at_start_up(stand_in, monkeypatch):
    model = Decoder(TINY_ARCHITECTURE, tiny_tensors(), dtype=torch.float32, fingerprint="")
    pool = KVPool(model.layout, 20, 256)

    def too_large(ids, positions, pool, step):
        if ids.shape[0] > 100:
            raise torch.cuda.OutOfMemoryError("600 tokens")
        raise AssertionError("the largest step comes first")

    monkeypatch.setattr(model, "forward", too_large)
    with pytest.raises(ConfigError, match="max_step_tokens=600: the GPU has no memory"):
        gpu.gpu_executor(
            model,
            pool,
            wanted="auto",
            graphs=False,
            max_running_requests=3,
            max_step_tokens=600,
            max_context_tokens=1024,
        )


class FullRecorder(FakeRecorder):
    def record(self, run):
        raise torch.OutOfMemoryError("while recording")


class BrokenRecorder(FakeRecorder):
    def record(self, run):
        try:
            raise torch.OutOfMemoryError("while recording")
        finally:
            raise RuntimeError("the recording ended early")


@pytest.mark.parametrize("recorder", [FullRecorder, BrokenRecorder])
def test_graphs_that_have_no_memory_are_missed_at_start_up(stand_in, monkeypatch, recorder):
    monkeypatch.setattr(gpu, "CudaRecorder", recorder)
    model = Decoder(TINY_ARCHITECTURE, tiny_tensors(), dtype=torch.float32, fingerprint="")
    with pytest.raises(ConfigError, match=r"max_running_requests=3: .* cuda_graphs: false"):
        gpu.gpu_executor(
            model,
            KVPool(model.layout, 20, 256),
            wanted="auto",
            graphs=True,
            max_running_requests=3,
            max_step_tokens=600,
            max_context_tokens=1024,
        )


@pytest.mark.parametrize(("context", "prompts"), [(1024, [600]), (256, [256, 256, 88])])
def test_the_largest_steps_and_the_most_tokens_are_tried_at_start_up(
    stand_in, monkeypatch, context, prompts
):
    model = Decoder(TINY_ARCHITECTURE, tiny_tensors(), dtype=torch.float32, fingerprint="")
    forward, sample = model.forward, gpu.BatchedSampler.sample
    steps, sampled = [], []

    def spy(ids, positions, pool, step):
        steps.append((ids.shape[0], list(step.q_lens)))
        return forward(ids, positions, pool, step)

    def spy_on_sampler(sampler, logits, request_ids, positions):
        sampled.append(logits.shape[0])
        return sample(sampler, logits, request_ids, positions)

    monkeypatch.setattr(model, "forward", spy)
    monkeypatch.setattr(gpu.BatchedSampler, "sample", spy_on_sampler)
    executor = gpu.gpu_executor(
        model,
        KVPool(model.layout, 20, 256),
        wanted="auto",
        graphs=False,
        max_running_requests=5,
        max_step_tokens=600,
        max_context_tokens=context,
    )
    beside = [*prompts[:-1], prompts[-1] - 1, 1]
    assert steps == [(600, prompts), (600, beside), (5, [1] * 5)]
    assert sampled == [5]
    assert not executor._sampler._entries


def drive(model, *, on_gpu):
    """Greedy tokens of some requests, through the whole engine."""
    settings = EngineConfig(
        model=ModelConfig(name="m", source="tiny"),
        max_context_tokens=512,
        block_tokens=256,
        num_blocks=30,
        scheduler=SchedulerConfig(max_chunk_tokens=50),
    )
    built = assemble(settings, model, load_text("tiny").tokenizer)
    if on_gpu:
        built.engine._executor = gpu.gpu_executor(
            model,
            built.pool,
            wanted="auto",
            graphs=True,
            max_running_requests=8,
            max_step_tokens=100,
            max_context_tokens=512,
        )
    tokens = {}
    for i in range(6):
        prompt = tuple(32 + (5 * i + j) % 90 for j in range(20 + 31 * i))
        params = SamplingParams(max_tokens=8, temperature=0.0)
        built.engine.submit(Request(request_id=f"r{i}", prompt_ids=prompt, params=params))
        tokens[f"r{i}"] = []
    while (step := built.engine.step()) is not None:
        for output in step.outputs:
            tokens[output.request_id].append(output.token.token_id)
    return tokens


def test_a_model_loaded_for_a_gpu_gives_the_tokens_of_the_cpu(stand_in, caplog):
    with caplog.at_level(logging.INFO):
        model = load_model(config(dtype="float32"))
    assert "model m: H100, float32" in caplog.text
    assert "0 of 12 products as codes or fp8" in caplog.text
    want = load_model(ModelConfig(name="m", source="tiny", dtype="float32", backend="torch"))
    assert drive(model, on_gpu=True) == drive(want, on_gpu=False)


def test_fp8_weights_are_rounded_but_for_the_head(stand_in, caplog):
    with caplog.at_level(logging.INFO):
        model = load_model(config(quantisation="fp8"))
    assert "12 of 12 products as codes or fp8" in caplog.text
    assert isinstance(model._head, DenseLinear)
    assert model.dtype == "bfloat16"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_codes_of_a_checkpoint_stay_codes(stand_in, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = load_model(config(dtype="float32", quantisation="int4"))
    dense = load_model(config(dtype="float32"))
    matrices = [t for name, t in tiny_tensors().items() if t.dim() == 2 and name[0] == "l"]
    elements = sum(t.numel() for t in matrices)
    assert dense.weight_bytes - model.weight_bytes == elements * 4 - elements // 2 - elements // 4
    expanded = load_model(
        ModelConfig(name="m", source="tiny", dtype="float32", quantisation="int4", backend="torch")
    )
    got, want = drive(model, on_gpu=True), drive(expanded, on_gpu=False)
    assert sum(got[name][0] == want[name][0] for name in got) >= 5
