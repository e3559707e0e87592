"""One decoder for the Llama family, driven by an `Architecture` (Llama, Qwen2, Qwen3, Mistral).

Each layer is: RMSNorm, fused q/k/v product, rotation, attention over the paged pool, output product
onto the residual; RMSNorm, fused gate/up product, activation, down product onto the residual.
Everything is computed in the model's dtype, with float32 inside norms, rotation angles and softmax;
a float64 model is float64 throughout, which makes token equality a fair demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionBackend, StepContext
from engine.attention.cpu import CpuAttention
from engine.execution.pool import KVPool
from engine.models.architecture import Architecture, Rope
from engine.models.linear import Linear
from engine.models.model import KVLayout


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
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Implements `Model`.

    tensors: the canonical names of `engine.models.architecture`, each read once and converted to
    `dtype`. fingerprint: of the weights in that dtype; equal fingerprints make KV exchangeable.
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
    ) -> None:
        self.architecture = architecture
        self.device = torch.device(device)
        self.vocab_size = architecture.vocab_size
        self.max_context_tokens = architecture.max_context_tokens
        self.eos_token_ids = architecture.eos_token_ids
        self.layout = KVLayout(
            num_layers=architecture.num_layers,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            fingerprint=fingerprint,
        )
        self._attention = attention or CpuAttention(window=architecture.window)

        def take(name: str) -> Tensor:
            return tensors[name].to(device=self.device, dtype=dtype)

        def fuse(prefix: str, *names: str) -> Linear:
            weight = torch.cat([take(f"{prefix}.{name}") for name in names])
            bias = None
            if architecture.qkv_bias and names == ("q", "k", "v"):
                bias = torch.cat([take(f"{prefix}.{name}.bias") for name in names])
            return Linear(weight, bias)

        with torch.inference_mode():
            self._embed = take("embed")
            self._layers: list[_Layer] = []
            for i in range(architecture.num_layers):
                at = f"layers.{i}"
                self._layers.append(
                    _Layer(
                        attn_norm=take(f"{at}.attn_norm"),
                        qkv=fuse(at, "q", "k", "v"),
                        q_norm=take(f"{at}.q_norm") if architecture.qk_norm else None,
                        k_norm=take(f"{at}.k_norm") if architecture.qk_norm else None,
                        o=Linear(take(f"{at}.o")),
                        mlp_norm=take(f"{at}.mlp_norm"),
                        gate_up=fuse(at, "gate", "up"),
                        down=Linear(take(f"{at}.down")),
                    )
                )
            self._norm = take("norm")
            self._head = Linear(self._embed if architecture.tied_embeddings else take("head"))
            self._angles = RotaryAngles(
                architecture.rope, architecture.head_dim, dtype, self.device
            )

    def forward(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        """See `Model.forward`."""
        with torch.inference_mode():
            hidden = self._hidden(ids, positions, pool, step)  # [sampled, hidden]
            if hidden.shape[0] == 0:
                wide = torch.promote_types(hidden.dtype, torch.float32)
                return hidden.new_empty((0, self.vocab_size), dtype=wide)
            return self._head.unrounded(self._rms_norm(hidden, self._norm))

    def _hidden(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        heads, kv_heads = self.architecture.num_heads, self.architecture.num_kv_heads
        num_tokens = ids.shape[0]
        x = F.embedding(ids, self._embed)  # [tokens, hidden]
        cos, sin = self._angles.at(positions)
        final = len(self._layers) - 1
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
            x = layer.o.add_to(x, attended)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = layer.down.add_to(x, self._activate(gate).mul_(up))
        return x

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)

    def _activate(self, gate: Tensor) -> Tensor:
        if self.architecture.activation == "silu":
            return F.silu(gate)
        return F.gelu(gate, approximate="tanh")
