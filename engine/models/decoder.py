"""One decoder for the Llama family, driven by an `Architecture` (Llama, Qwen2, Qwen3, Mistral).

Each layer is: RMSNorm, fused q/k/v product, rotation, attention over the paged pool, output product
onto the residual; RMSNorm, fused gate/up product, activation, down product onto the residual.
Everything is computed in the model's dtype, with float32 inside norms, rotation angles and softmax;
a float64 model is float64 throughout, which makes token equality a fair demand.

A `Shard` makes it one rank's part of that: its own heads, inner rows, rows of the vocabulary and
layers. Each layer then has two sums over the ranks of the stage, behind the output product and
behind the down product, to which the residual is added once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionBackend, StepContext
from engine.attention.cpu import CpuAttention
from engine.config import KVDType
from engine.execution.pool import KVPool
from engine.models.architecture import Architecture, Rope
from engine.models.linear import Linear, LinearLike, Products
from engine.models.model import KVLayout
from engine.models.parallel import TensorGroup
from engine.models.shard import Grid, Shard, Span, shards
from engine.weights.checkpoint import part


class RotaryAngles:
    """Cosines and sines of the rotation, in the precision of the model but no less than float32."""

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(self._wide) / head_dim
        frequency = 1.0 / (rope.theta**exponent)  # [head_dim / 2]
        if rope.llama3 is not None:
            # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between
            # blended (transformers `_compute_llama3_parameters`).
            scaling = rope.llama3
            wavelength = 2 * math.pi / frequency
            context = scaling.original_context_tokens
            smooth = (context / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
            stretched = torch.where(
                wavelength > context / scaling.low_freq_factor,
                frequency / scaling.factor,
                blended,
            )
            frequency = torch.where(
                wavelength < context / scaling.high_freq_factor, frequency, stretched
            )
        self._frequency = frequency.to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[tokens]` to cos and sin, each `[tokens, 1, head_dim]`, the sin of half one negated."""
        angle = positions.to(self._wide)[:, None] * self._frequency
        cos, sin = angle.cos().to(self._dtype), angle.sin().to(self._dtype)
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + dim / 2])` of each head. x: `[tokens, heads, dim]`."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.mul(x, cos).addcmul_(swapped, sin)


@dataclass(slots=True)
class _Layer:
    attn_norm: Tensor
    qkv: LinearLike
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearLike
    mlp_norm: Tensor
    gate_up: LinearLike
    down: LinearLike


class Decoder:
    """Implements `Model`.

    tensors: the canonical names of `engine.models.architecture`, each read once and converted to
    `dtype`, of which a shard reads its slices only. fingerprint: of the weights in that dtype;
    equal fingerprints make KV exchangeable. shard: None for the whole model; `group` is the ranks
    of its stage. kv_dtype: as configured. products: what multiplies, on another device than a CPU.
    Not thread-safe: one pass at a time.
    """

    def __init__(
        self,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        fingerprint: str,
        attention: AttentionBackend | None = None,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
        group: TensorGroup | None = None,
        kv_dtype: KVDType = "auto",
        products: Products | None = None,
    ) -> None:
        self.architecture = architecture
        self.shard = shard = shard or shards(architecture, Grid())[0]
        self.hidden_size = architecture.hidden_size
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = torch.device(device)
        self.vocab_size = architecture.vocab_size
        self.max_context_tokens = architecture.max_context_tokens
        self.eos_token_ids = architecture.eos_token_ids
        layout = KVLayout(
            num_layers=shard.num_layers,
            num_kv_heads=shard.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=self.dtype,
            fingerprint=fingerprint,
        )
        self.layout = layout.kept_as(kv_dtype)
        self._attention = attention or CpuAttention(window=architecture.window)

        self.weight_bytes = 0
        """What this part's weights take."""

        is_split = shard.grid.tensor_parallel > 1
        assert not is_split or group is not None
        self._group = group if is_split else None
        dim = architecture.head_dim
        rows: dict[str, Span] = {
            "q": _times(shard.heads, dim),
            "k": _times(shard.kv_heads, dim),
            "v": _times(shard.kv_heads, dim),
            "gate": shard.inner,
            "up": shard.inner,
        }

        def take(name: str, dim: int = 0, span: Span | None = None) -> Tensor:
            tensor = (
                tensors[name] if span is None or not is_split else part(tensors, name, dim, span)
            )
            return tensor.to(device=self.device, dtype=dtype)

        def count(tensor: Tensor) -> Tensor:
            self.weight_bytes += tensor.numel() * tensor.itemsize
            return tensor

        def product(
            names: Sequence[str], weight: Callable[[], Tensor], bias: Tensor | None = None
        ) -> LinearLike:
            if products is None:
                return Linear(count(weight()), bias)
            coded = None if is_split else products.coded(names, bias)
            if coded is None:
                return products.dense(count(weight()), bias)
            self.weight_bytes += coded.num_bytes
            return coded

        def fuse(prefix: str, *names: str) -> LinearLike:
            def weight() -> Tensor:
                return torch.cat([take(f"{prefix}.{name}", 0, rows[name]) for name in names])

            bias = None
            if architecture.qkv_bias and names == ("q", "k", "v"):
                bias = torch.cat([take(f"{prefix}.{name}.bias", 0, rows[name]) for name in names])
            return product([f"{prefix}.{name}" for name in names], weight, bias)

        def shared(name: str, span: Span) -> LinearLike:
            """A product whose inputs are shared out among ranks."""
            return product([name], lambda: take(name, 1, span))

        def vocabulary(name: str) -> Tensor:
            """This rank's rows, filled up with zeros to as many as every rank has."""
            weight = take(name, 0, shard.vocab)
            missing = shard.vocab_rows - weight.shape[0]
            return count(F.pad(weight, (0, 0, 0, missing)) if missing else weight)

        with torch.inference_mode():
            tied = architecture.tied_embeddings
            if shard.is_first_stage or (shard.is_last_stage and tied):
                self._embed = vocabulary("embed")
            self._layers: list[_Layer] = []
            for i in range(*shard.layers):
                at = f"layers.{i}"
                self._layers.append(
                    _Layer(
                        attn_norm=take(f"{at}.attn_norm"),
                        qkv=fuse(at, "q", "k", "v"),
                        q_norm=take(f"{at}.q_norm") if architecture.qk_norm else None,
                        k_norm=take(f"{at}.k_norm") if architecture.qk_norm else None,
                        o=shared(f"{at}.o", rows["q"]),
                        mlp_norm=take(f"{at}.mlp_norm"),
                        gate_up=fuse(at, "gate", "up"),
                        down=shared(f"{at}.down", shard.inner),
                    )
                )
            if shard.is_last_stage:
                self._norm = take("norm")
                head = self._embed if tied else vocabulary("head")
                self._head = Linear(head) if products is None else products.head(head)
            self._angles = RotaryAngles(
                architecture.rope, architecture.head_dim, dtype, self.device
            )

    def use_attention(self, attention: AttentionBackend) -> None:
        """Compute attention by another backend, as one that was chosen for the pool."""
        self._attention = attention

    def forward(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        """See `Model.forward`. The whole model only, not a stage of it."""
        assert self.shard.is_first_stage
        with torch.inference_mode():
            logits = self.logits(self.hidden(ids, positions, pool, step))
        assert logits is not None
        return logits

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Of hidden states `[sampled, hidden]` of the last stage: `[sampled, vocab]`, float32 or
        float64, on the stage's first rank; None on its others."""
        if hidden.shape[0] == 0:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return hidden.new_empty((0, self.vocab_size), dtype=wide)
        logits = self._head.unrounded(self._rms_norm(hidden, self._norm))
        if self._group is None:
            return logits
        parts = self._group.gather(logits)
        # Padding lies behind the last token: cut off, it cannot be drawn.
        return None if parts is None else torch.cat(parts, dim=-1)[:, : self.vocab_size]

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        pool: KVPool,
        step: StepContext,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """This stage's layers. `hidden`: what the stage before returned, None for the first.

        Returns `[tokens, hidden]`, from the last stage `[sampled, hidden]`, on every rank alike.
        """
        shard = self.shard
        heads, kv_heads = shard.num_heads, shard.num_kv_heads
        num_tokens = ids.shape[0]
        x = self._embedded(ids) if hidden is None else hidden  # [tokens, hidden]
        cos, sin = self._angles.at(positions)
        final = len(self._layers) - 1 if shard.is_last_stage else None
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._rms_norm(x, layer.attn_norm))
            qkv = qkv.view(num_tokens, heads + 2 * kv_heads, -1)  # [tokens, heads, head_dim]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = rotate(self._rms_norm(qkv[:, :heads], layer.q_norm), cos, sin)
                k = rotate(self._rms_norm(qkv[:, heads:-kv_heads], layer.k_norm), cos, sin)
            else:
                rotated = rotate(qkv[:, :-kv_heads], cos, sin)
                q, k = rotated[:, :heads], rotated[:, heads:]
            attended = self._attention.attend(q, k, qkv[:, -kv_heads:], i, pool, step)
            attended = attended.reshape(num_tokens, -1)
            if i == final:
                # Behind the last attention nothing mixes tokens: only the wanted rows go on.
                attended, x = attended[step.last], x[step.last]
            x = self._add(layer.o, x, attended)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = self._add(layer.down, x, self._activate(gate).mul_(up))
        return x

    def _embedded(self, ids: Tensor) -> Tensor:
        if self._group is None:
            return F.embedding(ids, self._embed)
        first, last = self.shard.vocab
        elsewhere = (ids < first) | (ids >= last)
        x = F.embedding((ids - first).masked_fill_(elsewhere, 0), self._embed)
        return self._group.sum(x.masked_fill_(elsewhere[:, None], 0))

    def _add(self, linear: LinearLike, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + linear(x)`, where each rank has some of the product's inputs."""
        if self._group is None:
            return linear.add_to(residual, x)
        return residual + self._group.sum(linear(x))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)

    def _activate(self, gate: Tensor) -> Tensor:
        if self.architecture.activation == "silu":
            return F.silu(gate)
        return F.gelu(gate, approximate="tanh")


def _times(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor
