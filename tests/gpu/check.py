#!/usr/bin/env python3
"""Checks and times the GPU path of the engine on one GPU, in under five minutes.

    python tests/gpu/check.py [--json FILE] [--budget-s 270] [--only NAME ...]

Needs this repository, torch and transformers; uses Triton, flash-attn and NIXL where they are
installed, and says what could not be checked where they are not. Prints a table, and the same as
JSON to --json.

Exit status: 0 everything was checked and is right; 1 something is wrong; 3 nothing is wrong, but
something could not be checked (without a GPU that is nearly all of it).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

WRONG, UNCHECKED = 1, 3
PREFILL_TOKENS = (512, 2048, 8192)
PACKAGES = ("torch", "transformers", "triton", "flash_attn", "nixl_cu12", "nixl_cu13", "ray")


@dataclass
class Row:
    """One line of the table."""

    name: str
    status: str
    """`ok`, `wrong`, `unchecked`."""

    value: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


class Unchecked(Exception):
    """Something is missing here; the message says what."""


@dataclass
class Found:
    """What a check found out."""

    value: str
    ok: bool = True
    numbers: dict[str, float] = field(default_factory=dict)


CHECKS: dict[str, Callable[[], Iterator[tuple[str, Found | Unchecked]]]] = {}


def check(name):
    def register(function):
        CHECKS[name] = function
        return function

    return register


def gpu():
    if not torch.cuda.is_available():
        raise Unchecked(why_no_gpu())
    return torch.device("cuda")


def why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "no CUDA device (nvidia-smi, CUDA_VISIBLE_DEVICES)"


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of `run` on the device."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in pairs)
    return times[len(times) // 2] / 1000


# What models are checked and timed with


class RandomTensors(Mapping):
    """Weights of an architecture, made on the device when they are asked for."""

    def __init__(self, architecture, device, dtype):
        self._shapes = architecture.tensor_shapes()
        self._device, self._dtype = device, dtype

    def __getitem__(self, name):
        shape = self._shapes[name]
        generator = torch.Generator(device=self._device).manual_seed(
            int.from_bytes(name.encode(), "little") % (1 << 31)
        )
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        made = torch.randn(shape, device=self._device, dtype=torch.float32, generator=generator)
        return (made / math.sqrt(shape[1])).to(self._dtype)

    def __iter__(self):
        return iter(self._shapes)

    def __len__(self):
        return len(self._shapes)


def architecture(**changes):
    """Llama 3.1 8B's shape, unless changed."""
    from engine.models.architecture import Architecture, Rope

    values = {
        "name": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "norm_eps": 1e-5,
        "rope": Rope(theta=500_000.0),
        "max_context_tokens": 8192,
        "tied_embeddings": False,
    }
    return Architecture(**{**values, **changes})


def small(**changes):
    return architecture(
        vocab_size=512,
        hidden_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        **changes,
    )


def decoder(shape, device, dtype, backend, tensors=None):
    from engine.models.decoder import Decoder

    return Decoder(
        shape,
        tensors or RandomTensors(shape, device, dtype),
        dtype=dtype,
        fingerprint="check",
        attention=backend,
        device=device,
    )


def backends(device, *, dtype="bfloat16", head_dim=128, block_tokens=256, **needs):
    """Each attention backend of a GPU, or why there is none: name, backend or Unchecked."""
    from engine.attention.capabilities import ATTENTION, AttentionNeeds, lacks
    from engine.attention.select import cuda_device, make_attention

    found = cuda_device(device.index or 0)
    wanted = AttentionNeeds(
        dtype=dtype, kv_dtype=dtype, head_dim=head_dim, block_tokens=block_tokens, **needs
    )
    for name, can in ATTENTION.items():
        if can.kind != "cuda":
            continue
        reason = lacks(name, found, wanted)
        if reason is not None:
            yield name, Unchecked(reason)
        else:
            yield name, make_attention(found, wanted, window=None, wanted=name)[1]


def best_backend(device, **needs):
    for _, backend in backends(device, **needs):
        if not isinstance(backend, Unchecked):
            return backend
    raise Unchecked("no attention backend")


def plan_of(rows, *, page, first=1, sample=True):
    """A plan of `rows` = [(tokens in KV, tokens to compute)], each in blocks of its own."""
    from engine.scheduling.plan import Chunk, StepPlan

    chunks = []
    for i, (before, count) in enumerate(rows):
        used = -(-(before + count) // page)
        chunks.append(
            Chunk(
                request_id=f"r{i}",
                first_token=before,
                token_ids=tuple((37 * i + j) % 500 for j in range(count)),
                blocks=tuple(range(first, first + used)),
                sample=sample,
            )
        )
        first += used
    return StepPlan(chunks=tuple(chunks))


# Checks


@check("environment")
def environment():
    for name in PACKAGES:
        try:
            yield name, Found(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield name, Unchecked("not installed")
    if not torch.cuda.is_available():
        yield "device", Unchecked(why_no_gpu())
        return
    properties = torch.cuda.get_device_properties(0)
    yield (
        "device",
        Found(
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}",
            numbers={"compute": properties.major + properties.minor / 10},
        ),
    )


def attention_cases():
    yield "decode", (1, 1, 1, 1), (5, 300, 1025, 2048)
    yield "verify", (5, 5), (600, 9)
    yield "prefill", (700, 64), (700, 300)
    yield "mixed", (1, 300, 1), (1500, 900, 20)
    yield "more queries than keys", (6, 2), (4, 300)


def against_definition(
    backend, *, page, window, softcap, dtype, device, head_dim=128, kv_dtype="auto"
):
    """Largest error of a backend over all cases beside the CPU's twin in float64.

    kv_dtype: where keys and values are codes, they count as what the codes stand for.
    """
    from engine.attention.backend import StepContext
    from engine.attention.flash_twin import flash_attn_varlen_func
    from engine.attention.slots import store
    from engine.execution.pool import KVPool
    from engine.models.model import KVLayout
    from engine.quantisation.kv_codes import from_codes, to_codes

    worst = 0.0
    for _, q_lens, k_lens in attention_cases():
        generator = torch.Generator().manual_seed(1)
        layout = KVLayout(
            num_layers=2,
            num_kv_heads=2,
            head_dim=head_dim,
            dtype=str(dtype).removeprefix("torch."),
            fingerprint="",
        )
        total = sum(-(-n // page) for n in k_lens) + 2
        pool = KVPool(layout.kept_as(kv_dtype), total, page, device)
        coded = pool.layout.coded
        # What nobody wrote must not matter.
        unwritten = (pool.key_scales(1), pool.value_scales(1)) if coded else (pool.data,)
        for values in unwritten:
            values.fill_(math.nan)
        columns = max(1, *(-(-n // page) for n in k_lens))
        table = torch.zeros(len(k_lens), columns, dtype=torch.int32)
        free = iter((torch.randperm(total - 1, generator=generator) + 1).tolist())
        keys, values, slots = [], [], []
        for row, (m, n) in enumerate(zip(q_lens, k_lens, strict=True)):
            for column in range(-(-n // page)):
                table[row, column] = next(free)
            k, v = (torch.randn(n, 2, head_dim, generator=generator).to(dtype) for _ in range(2))
            keys.append(k)
            values.append(v)
            at = torch.arange(n)
            blocks, offsets = table[row, at // page].long().to(device), (at % page).to(device)
            store(k.to(device), v.to(device), 1, pool, (blocks, offsets))
            new = torch.arange(max(n - m, 0), n)
            slots.append(table[row, new // page].long() * page + new % page)
            missing = m - len(new)  # queries without a key of their own write to block 0
            slots.append(torch.zeros(max(missing, 0), dtype=torch.int64))
        q = torch.randn(sum(q_lens), 8, head_dim, generator=generator).to(dtype)
        fresh = [
            torch.cat(
                [
                    torch.cat((part[max(n - m, 0) :], part.new_zeros(max(m - n, 0), 2, head_dim)))
                    for part, m, n in zip(parts, q_lens, k_lens, strict=True)
                ]
            )
            for parts in (keys, values)
        ]
        cumulative = torch.tensor([0, *q_lens]).cumsum(0).int()
        step = StepContext(
            slots=torch.cat(slots).to(device),
            cu_q=cumulative.to(device),
            kv_lens=torch.tensor(k_lens, dtype=torch.int32, device=device),
            block_table=table.to(device),
            last=torch.zeros(0, dtype=torch.int64, device=device),
            max_q=max(q_lens),
            max_k=max(k_lens),
            uniform_q=q_lens[0] if len(set(q_lens)) == 1 else None,
            q_lens=q_lens,
            k_lens=k_lens,
        )
        got = backend.attend(q.to(device), *(x.to(device) for x in fresh), 1, pool, step)
        if coded:
            keys, values = (
                [from_codes(*to_codes(part, pool.code_dtype), torch.float64) for part in parts]
                for parts in (keys, values)
            )
        want = flash_attn_varlen_func(
            q.double(),
            torch.cat(keys).double(),
            torch.cat(values).double(),
            cumulative,
            torch.tensor([0, *k_lens]).cumsum(0).int(),
            max(q_lens),
            max(k_lens),
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap,
        )
        worst = max(worst, float((got.cpu().double() - want).abs().max()))
    return worst


@check("attention")
def attention():
    device = gpu()
    from engine.attention.capabilities import ATTENTION, AttentionNeeds, lacks
    from engine.attention.select import cuda_device, make_attention

    found = cuda_device()
    for name, can in ATTENTION.items():
        if can.kind != "cuda":
            continue
        for dtype in can.dtypes:
            for page, head_dim, window, softcap in (
                (256, 128, None, 0.0),
                (256, 64, 100, 0.0),
                (256, 256, None, 30.0),
                (16, 80, 50, 0.0),
            ):
                needs = AttentionNeeds(
                    dtype=dtype,
                    kv_dtype=dtype,
                    head_dim=head_dim,
                    block_tokens=page,
                    window=window is not None,
                    softcap=softcap > 0,
                )
                label = f"{name} {dtype} block {page} head {head_dim}"
                label += f" window {window}" * (window is not None) + " softcap" * (softcap > 0)
                reason = lacks(name, found, needs)
                if reason is not None:
                    # A rule of the backend is no gap of this machine.
                    if "installed" in reason or "imported" in reason or "compute" in reason:
                        yield label, Unchecked(reason)
                    continue
                _, backend = make_attention(
                    found, needs, window=window, wanted=name, softcap=softcap
                )
                limit = 2e-3 if dtype == "float32" else 2e-2 if dtype == "bfloat16" else 4e-3
                error = against_definition(
                    backend,
                    page=page,
                    window=window,
                    softcap=softcap,
                    dtype=getattr(torch, dtype),
                    device=device,
                    head_dim=head_dim,
                )
                yield (
                    label,
                    Found(
                        f"largest error {error:.1e} (limit {limit:.0e})",
                        error < limit,
                        {"error": error},
                    ),
                )
    for kept, kv_dtype in (("int8", "int8"), ("float8_e4m3fn", "fp8")):
        coded = AttentionNeeds(dtype="bfloat16", kv_dtype=kept, head_dim=128, block_tokens=256)
        label = f"triton bfloat16 over {kv_dtype} KV"
        reason = lacks("triton", found, coded)
        if reason is not None:
            yield label, Unchecked(reason)
            continue
        _, backend = make_attention(found, coded, window=None, wanted="triton")
        error = against_definition(
            backend,
            page=256,
            window=None,
            softcap=0.0,
            dtype=torch.bfloat16,
            device=device,
            kv_dtype=kv_dtype,
        )
        yield (
            label,
            Found(f"largest error {error:.1e} (limit 2e-02)", error < 2e-2, {"error": error}),
        )


@check("products")
def products():
    device = gpu()
    from engine.attention.select import cuda_device
    from engine.models.device_linear import (
        DenseLinear,
        Fp8Linear,
        coded_linear,
        weights_unavailable,
    )
    from engine.quantisation.rounding import round_to_codes

    found = cuda_device()
    weight = torch.randn(1024, 2048) / math.sqrt(2048)
    for kind in ("none", "fp8", "int8", "int4"):
        reason = weights_unavailable(found, kind)
        if reason is not None:
            yield kind, Unchecked(reason)
            continue
        stored, limit = weight, 0.01
        if kind.startswith("int"):
            stored = round_to_codes(weight, 8 if kind == "int8" else 4, 64)
        want_of = weight if kind in ("none", "fp8") else stored.expand(torch.float32)
        if kind == "fp8":
            limit = 0.06
        if kind.startswith("int"):
            linear = coded_linear(stored, None, device=device, dtype=torch.bfloat16)
        else:
            product = Fp8Linear if kind == "fp8" else DenseLinear
            linear = product(weight.to(device=device, dtype=torch.bfloat16))
        worst = 0.0
        for rows in (1, 7, 16, 64, 300):
            x = torch.randn(rows, 2048).bfloat16()
            want = x.double() @ want_of.double().t()
            got = linear(x.to(device)).cpu().double()
            worst = max(worst, float((got - want).pow(2).mean().sqrt() / want.std()))
        yield (
            kind,
            Found(f"relative error {worst:.1e} (limit {limit:g})", worst < limit, {"error": worst}),
        )


@check("sampling")
def sampling():
    device = gpu()
    from engine.request import SamplingParams
    from engine.sampling.batched import BatchedSampler
    from engine.sampling.sampler import Sampler

    vocabulary, rows, same, total = 32_000, 16, 0, 0
    here, there = Sampler(vocabulary, ()), BatchedSampler(vocabulary, ())
    for i in range(rows):
        params = SamplingParams(
            max_tokens=10_000,
            seed=i,
            temperature=float(i % 4 != 0),
            top_k=40 if i % 4 == 2 else 0,
            frequency_penalty=0.3 if i % 4 == 3 else 0.0,
        )
        for sampler in (here, there):
            sampler.enter(f"r{i}", params, (1, 2, 3), 3)
    ids = [f"r{i}" for i in range(rows)]
    for step in range(8):
        logits = torch.randn(rows, vocabulary) * 3
        mine = here.sample(logits, ids, [3 + step] * rows)
        other = there.sample(logits.to(device), ids, [3 + step] * rows)
        same += sum(a.token_id == b.token_id for a, b in zip(mine, other, strict=True))
        total += rows
    yield (
        "tokens equal to the CPU's",
        Found(f"{same} of {total}", same == total, {"same": same, "total": total}),
    )
    logits = torch.randn(64, 128_256, device=device)
    wide = BatchedSampler(128_256, ())
    for i in range(64):
        wide.enter(f"w{i}", SamplingParams(max_tokens=10_000, seed=i, temperature=1.0), (1,), 1)
    names = [f"w{i}" for i in range(64)]
    took = seconds(lambda: wide.sample(logits, names, [2] * 64), repeats=5)
    yield (
        "64 rows of 128,256 at temperature 1",
        Found(f"{took * 1e3:.2f} ms", numbers={"ms": took * 1e3}),
    )


@check("decoder")
def the_decoder():
    device = gpu()
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool

    shape, page = small(), 256
    cpu = torch.device("cpu")
    weights = dict(RandomTensors(shape, cpu, torch.float32))
    plans = [
        plan_of([(0, 300), (0, 7)], page=page),
        plan_of([(300, 1), (7, 1)], page=page),
        plan_of([(301, 1), (8, 20)], page=page),
    ]

    def logits_of(model):
        pool = KVPool(model.layout, 8, page, model.device)
        out = []
        # Two rows of KV that grow: the first needs two blocks.
        for plan in plans:
            ids, positions, step = step_inputs(plan, page, model.device)
            out.append(model.forward(ids, positions, pool, step).cpu().double())
        return torch.cat(out)

    from engine.attention.cpu import CpuAttention

    want = logits_of(decoder(shape, cpu, torch.float32, CpuAttention(), weights))
    for name, backend in backends(device, head_dim=64):
        if isinstance(backend, Unchecked):
            yield name, backend
            continue
        got = logits_of(decoder(shape, device, torch.bfloat16, backend, weights))
        error = float((got - want).pow(2).mean().sqrt() / want.std())
        yield (
            f"{name} bfloat16 beside float32 on the CPU",
            Found(f"relative error {error:.1e} (limit 3e-2)", error < 3e-2, {"error": error}),
        )


@check("transformers")
def parity():
    device = gpu()
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise Unchecked(f"transformers: {error}") from error
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool

    shape, page = small(), 256
    weights = dict(RandomTensors(shape, torch.device("cpu"), torch.float32))
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=False,
        attention_bias=False,
    )
    oracle = LlamaForCausalLM(config).to(device=device, dtype=torch.float32).eval()
    names = {
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    state = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["norm"],
        "lm_head.weight": weights["head"],
    }
    for i in range(shape.num_layers):
        for theirs, ours in names.items():
            state[f"model.layers.{i}.{theirs}.weight"] = weights[f"layers.{i}.{ours}"]
    oracle.load_state_dict(state)
    prompt = [(7 * i) % 500 for i in range(200)]
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=device)
        want = oracle(ids, use_cache=False).logits[0, -1].double().cpu()
    model = decoder(shape, device, torch.bfloat16, best_backend(device, head_dim=64), weights)
    from engine.scheduling.plan import Chunk, StepPlan

    chunk = Chunk(request_id="r", first_token=0, token_ids=tuple(prompt), blocks=(1,), sample=True)
    pool = KVPool(model.layout, 3, page, device)
    inputs = step_inputs(StepPlan(chunks=(chunk,)), page, device)
    got = model.forward(inputs[0], inputs[1], pool, inputs[2])[0].double().cpu()
    error = float((got - want).pow(2).mean().sqrt() / want.std())
    top = set(want.topk(5).indices.tolist())
    right = int(got.argmax()) in top
    yield (
        "logits beside transformers in float32",
        Found(
            f"relative error {error:.1e} (limit 3e-2), top-1 in its top-5: {right}",
            error < 3e-2 and right,
            {"error": error},
        ),
    )


@check("graphs")
def graphs():
    device = gpu()
    from engine.execution.cuda import CudaRecorder
    from engine.execution.graphs import DecodeGraphs, GraphBuckets
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool

    shape, page = small(), 256
    for name, backend in backends(device, head_dim=64, graphs=True):
        if isinstance(backend, Unchecked):
            yield name, backend
            continue
        model = decoder(shape, device, torch.bfloat16, backend)
        pool = KVPool(model.layout, 40, page, device)
        pool.data.normal_()
        recorded = DecodeGraphs(model, pool, GraphBuckets((1, 2, 4, 8), (1, 4)), CudaRecorder())
        began = time.perf_counter()
        recorded.record()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        worst = 0.0
        for rows in (1, 2, 3, 4, 5, 7, 8):  # one under, at and over each bucket
            for before in (3, 255, 256, 700):
                plan = plan_of([(before + i, 1) for i in range(rows)], page=page)
                ids, positions, step = step_inputs(plan, page, device)
                want = model.forward(ids, positions, pool, step).clone()
                got = recorded.run(plan)
                if got is None:
                    raise AssertionError(f"no graph for {rows} rows")
                worst = max(worst, float((got - want).abs().max() / want.std()))
        yield (
            f"{name} beside eager",
            Found(
                f"largest difference {worst:.1e} of a logit's spread (limit 0.1); "
                f"8 recorded in {took:.1f} s",
                worst < 0.1,
                {"difference": worst, "record_s": took},
            ),
        )


def timed_shape(device):
    """As much of an 8B model as fits well: layers are all alike, so rates are those of all 32."""
    free = torch.cuda.mem_get_info(device)[0]
    layers = int(min(16, max(2, (free * 0.5 - 2.2e9) // 4.4e8)))
    return architecture(num_layers=layers)


_TIMED: dict[str, object] = {}


def timed_model(device):
    if "model" not in _TIMED:
        shape = timed_shape(device)
        backend = best_backend(device, head_dim=shape.head_dim, graphs=True)
        _TIMED["model"] = decoder(shape, device, torch.bfloat16, backend)
    return _TIMED["model"]


def copy_rate(device) -> float:
    """Bytes a second that are read and written by a copy within the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def product_rate(device) -> float:
    """Operations a second of a large product in bfloat16."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, repeats=10)


def matrix_elements(shape) -> int:
    """Weights of one layer's matrices."""
    return shape.hidden_size * (2 * shape.q_size + 2 * shape.kv_size + 3 * shape.intermediate_size)


@check("decode")
def decode_speed():
    device = gpu()
    from engine.execution.cuda import CudaRecorder
    from engine.execution.graphs import DecodeGraphs, GraphBuckets
    from engine.execution.pool import KVPool

    peak = copy_rate(device)
    yield (
        "memory, measured by a copy",
        Found(f"{peak / 1e9:.0f} GB/s", numbers={"GBps": peak / 1e9}),
    )
    model = timed_model(device)
    shape, page, context = model.architecture, 256, 1024
    pool = KVPool(model.layout, 64 * (context // page) + 8, page, device)
    recorded = DecodeGraphs(
        model, pool, GraphBuckets((1, 16, 64), (context // page,)), CudaRecorder()
    )
    recorded.record()
    per_layer = matrix_elements(shape)
    weights = 2 * (shape.num_layers * per_layer + shape.vocab_size * shape.hidden_size)
    for rows in (1, 16, 64):
        plan = plan_of([(context - 2, 1)] * rows, page=page)
        took = seconds(lambda plan=plan: recorded.run(plan))
        read = weights + rows * context * model.layout.bytes_per_token
        share = read / took / peak
        yield (
            f"batch {rows}, {context} tokens of context, {shape.num_layers} layers",
            Found(
                f"{took * 1e3:.2f} ms, {read / took / 1e9:.0f} GB/s, {share:.0%} of the copy",
                numbers={"ms": took * 1e3, "GBps": read / took / 1e9, "share": share},
            ),
        )


@check("prefill")
def prefill_speed():
    device = gpu()
    from engine.execution.inputs import step_inputs
    from engine.execution.pool import KVPool

    peak = product_rate(device)
    yield (
        "matrix product, measured",
        Found(f"{peak / 1e12:.0f} TFLOP/s", numbers={"TFLOPps": peak / 1e12}),
    )
    model = timed_model(device)
    shape, page = model.architecture, 256
    per_layer = matrix_elements(shape)
    for tokens in PREFILL_TOKENS:
        pool = KVPool(model.layout, tokens // page + 3, page, device)
        plan = plan_of([(0, tokens)], page=page)
        ids, positions, step = step_inputs(plan, page, device)
        inputs = (ids, positions, pool, step)
        took = seconds(lambda inputs=inputs: model.forward(*inputs), repeats=5)
        flops = 2 * tokens * shape.num_layers * per_layer + 2 * shape.vocab_size * shape.hidden_size
        flops += shape.num_layers * 2 * tokens * tokens * shape.q_size  # half of each square
        share = flops / took / peak
        yield (
            f"{tokens} tokens, {shape.num_layers} layers",
            Found(
                f"{took * 1e3:.1f} ms, {flops / took / 1e12:.0f} TFLOP/s, {share:.0%} of the "
                "product",
                numbers={"ms": took * 1e3, "TFLOPps": flops / took / 1e12, "share": share},
            ),
        )


@check("prefill and decode apart")
def apart():
    device = gpu()
    try:
        from engine.build import assemble
        from engine.cache.hashing import hash_chain, root_hash
        from engine.config import EngineConfig, ModelConfig
        from engine.request import Request, SamplingParams
        from engine.text.text_model import load_text
        from engine.transfer.in_process import InProcessTransport
        from engine.transfer.intake import KVIntake
    except ImportError as error:
        raise Unchecked(f"the engine's own dependencies: {error}") from error
    shape, page = small(), 256
    tokenizer = load_text("tiny").tokenizer
    model = decoder(shape, device, torch.bfloat16, best_backend(device, head_dim=64))
    config = EngineConfig(
        model=ModelConfig(name="m", source="tiny"),
        max_context_tokens=2048,
        block_tokens=page,
        num_blocks=40,
    )

    def engine():
        return assemble(config, model, tokenizer)

    def drive(built, tokens):
        while (step := built.engine.step()) is not None:
            tokens += [out.token.token_id for out in step.outputs if out.token]
        return tokens

    def request():
        return Request(
            request_id="r",
            prompt_ids=tuple(32 + i % 90 for i in range(700)),
            params=SamplingParams(max_tokens=24, temperature=0.0),
        )

    alone = engine()
    alone.engine.submit(request())
    want = drive(alone, [])

    async def split():
        prefill, decode = engine(), engine()
        asked = request()
        reservation = decode.engine.submit(asked, remote=True)
        if reservation is None:
            raise AssertionError("no blocks for one request")
        first = reservation.num_cached_tokens
        intake = KVIntake(
            decode.pool, reservation.blocks, first_token=first, num_tokens=asked.num_tokens
        )
        root = root_hash(model.layout.fingerprint, asked.salt)
        began = time.perf_counter()
        done = await InProcessTransport(prefill.engine, prefill.pool).pull(
            "",
            asked,
            intake,
            chain=tuple(hash_chain(root, asked.token_ids, page)),
            chain_tokens=page,
        )
        took = time.perf_counter() - began
        output = decode.engine.kv_arrived("r", done.first)
        tokens = [] if output is None else [output.token.token_id]
        return drive(decode, tokens), took, done.num_bytes

    got, took, moved = asyncio.run(split())
    same = sum(a == b for a, b in zip(got, want, strict=False))
    yield (
        "greedy tokens of one engine and of two",
        Found(
            f"{same} of {len(want)} equal; prefill and {moved / 1e6:.1f} MB in {took * 1e3:.0f} ms",
            # Two passes of different shapes may round differently; a wrong block changes all.
            same >= len(want) // 2 and len(got) == len(want),
            {"same": same, "tokens": len(want), "ms": took * 1e3},
        ),
    )


@check("nixl")
def nixl():
    device = gpu()
    import threading

    from engine.errors import ConfigError
    from engine.execution.pool import KVPool
    from engine.models.model import KVLayout
    from engine.transfer.nixl import NixlAgent, require_nixl

    try:
        require_nixl()
    except ConfigError as error:
        raise Unchecked(str(error)) from error
    layout = KVLayout(
        num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", fingerprint="check"
    )
    pools = [KVPool(layout, 34, 256, device) for _ in range(2)]
    pools[0].data.normal_()
    torch.cuda.synchronize()
    agents = [
        NixlAgent(pool, lambda call, *args: call(*args), window_bytes=1 << 30) for pool in pools
    ]
    try:
        cards = [agent.start() for agent in agents]
        ready, ended = threading.Event(), threading.Event()
        found: list[object] = []

        def connected(error):
            found.append(error)
            ready.set()

        agents[1].add_peer("peer", cards[0], connected)
        if not ready.wait(60) or found[0] is not None:
            raise AssertionError(f"no connection: {found}")
        blocks = list(range(1, 33))
        results = []

        def done(read, result):
            results.append(result)
            ended.set()

        began = time.perf_counter()
        agents[1].read("peer", blocks, blocks, ended=done, quiet=lambda read: None)
        if not ended.wait(60) or results[0].error is not None:
            raise AssertionError(f"the read failed: {results}")
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        same = torch.equal(pools[0].data[1:33], pools[1].data[1:33])
        size = pools[0].data[1:33].numel() * 2
        yield (
            "blocks of device memory, read by another agent",
            Found(
                f"{size / 1e6:.0f} MB in {took * 1e3:.1f} ms ({size / took / 1e9:.1f} GB/s), "
                f"same bytes: {same}",
                same,
                {"GBps": size / took / 1e9},
            ),
        )
    finally:
        for agent in agents:
            agent.close()


def run(names: list[str], budget_s: float) -> list[Row]:
    rows = []
    deadline = time.monotonic() + budget_s
    for name in names:
        if time.monotonic() > deadline:
            rows.append(Row(name, "unchecked", f"the budget of {budget_s:g} s is used up"))
            continue
        try:
            with torch.inference_mode():
                for part, found in CHECKS[name]():
                    label = f"{name}: {part}"
                    if isinstance(found, Unchecked):
                        rows.append(Row(label, "unchecked", str(found)))
                    else:
                        status = "ok" if found.ok else "wrong"
                        rows.append(Row(label, status, found.value, found.numbers))
                    print(line(rows[-1]), file=sys.stderr, flush=True)
        except Unchecked as reason:
            rows.append(Row(name, "unchecked", str(reason)))
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(name, "wrong", f"{type(error).__name__}: {error}"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def line(row: Row) -> str:
    return f"{row.status:<10} {row.name:<62} {row.value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the table here too")
    parser.add_argument("--budget-s", type=float, default=270.0, help="start no check after this")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), help="these checks alone")
    options = parser.parse_args()
    began = time.monotonic()
    rows = run(options.only or list(CHECKS), options.budget_s)
    took = time.monotonic() - began
    counts = {
        status: sum(row.status == status for row in rows) for status in ("ok", "wrong", "unchecked")
    }
    status = WRONG if counts["wrong"] else UNCHECKED if counts["unchecked"] else 0
    for row in rows:
        print(line(row))
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{said}; {took:.0f} s; exit status {status}")
    if options.json:
        report = {
            "python": platform.python_version(),
            "seconds": took,
            "status": status,
            **counts,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
