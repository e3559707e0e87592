"""Small native decoders, and steps with shuffled blocks in a pool full of NaN."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.execution.inputs import step_inputs
from engine.execution.pool import KVPool
from engine.models.architecture import Architecture, Rope
from engine.native.decoder import NativeDecoder
from engine.native.library import VARIANTS, native_available, variants
from engine.scheduling.plan import Chunk, StepPlan

SMALL = Architecture(
    name="small",
    vocab_size=70,
    hidden_size=36,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    intermediate_size=41,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=4096,
    tied_embeddings=False,
)
"""No size is a multiple of what the kernels work in."""

KINDS = [
    (dtype, variant)
    for dtype, found in (("float32", VARIANTS), ("bfloat16", VARIANTS), ("float64", VARIANTS[:1]))
    for variant in found
]


@pytest.fixture(scope="session", params=KINDS, ids="-".join)
def kind(request):
    """(dtype, variant), skipped where this machine lacks it."""
    dtype, variant = request.param
    reason = native_available(dtype)
    if reason or variant not in variants(dtype):
        pytest.skip(reason or f"this processor lacks {variant} for {dtype}")
    return getattr(torch, dtype), variant


def random_tensors(architecture, seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in architecture.tensor_shapes().items():
        if "norm" in name:
            tensors[name] = 0.5 + torch.rand(shape, generator=g, dtype=torch.float64)
        else:
            tensors[name] = 0.3 * torch.randn(shape, generator=g, dtype=torch.float64)
    return tensors


def small_decoder(kind, *, num_threads=1, library=None, kv_codes=False, **changes):
    dtype, variant = kind
    if kv_codes:
        changes = {"head_dim": 12} | changes
    architecture = replace(SMALL, **changes)
    return NativeDecoder(
        architecture,
        random_tensors(architecture),
        dtype=dtype,
        fingerprint="small",
        kv_codes=kv_codes,
        variant=variant,
        num_threads=num_threads,
        library=library,
    )


class Batch:
    """Requests of given (queries, keys), each in shuffled blocks of its own."""

    def __init__(self, model, lengths, *, block_tokens=16, seed=0):
        self.model = model
        self.lengths = lengths
        counts = [-(-keys // block_tokens) for _, keys in lengths]
        g = torch.Generator().manual_seed(seed)
        shuffled = (torch.randperm(sum(counts), generator=g) + 1).tolist()
        self.blocks = []
        for count in counts:
            self.blocks.append(tuple(shuffled[:count]))
            shuffled = shuffled[count:]
        self.pool = KVPool(model.layout, sum(counts) + 1, block_tokens)
        self.pool.data.fill_(255 if model.layout.coded else math.nan)

    def inputs(self, ids=None):
        """Of one pass over every request's last tokens."""
        chunks = []
        for row, (queries, keys) in enumerate(self.lengths):
            tokens = ids[row][keys - queries : keys] if ids else [0] * queries
            chunks.append(
                Chunk(
                    request_id=str(row),
                    first_token=keys - queries,
                    token_ids=tuple(tokens),
                    blocks=self.blocks[row],
                    sample=True,
                )
            )
        return step_inputs(StepPlan(chunks=tuple(chunks)), self.pool.block_tokens)


@pytest.fixture(scope="session")
def make():
    """Factories: decoders of a kind, batches for them, their weights in float64."""
    return SimpleNamespace(decoder=small_decoder, batch=Batch, tensors=random_tensors, small=SMALL)
