"""One decoder layer over whole sequences, stage by stage, for looking at what its matrices read.

The arithmetic of `engine.models.decoder` without a paged pool, in the dtype of the tensors given.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.architecture import Architecture
from engine.models.decoder import RotaryAngles, rotate


class LayerFunction:
    """The stages of a layer. Tensors are looked up by part (`q`, `attn_norm`, ...) at each call, so
    that replaced ones count."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self._a = architecture
        self._angles = RotaryAngles(
            architecture.rope, architecture.head_dim, dtype, torch.device("cpu")
        )

    def read_by_qkv(self, x: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        """`[tokens, hidden]` to what q, k and v read."""
        return self._norm(x, layer["attn_norm"])

    def read_by_o(self, normed: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        """What q, k and v read, of one sequence from its beginning, to what o reads."""
        a = self._a
        num_tokens = normed.shape[0]

        def product(part: str) -> Tensor:
            return F.linear(normed, layer[part], layer.get(f"{part}.bias")).view(
                num_tokens, -1, a.head_dim
            )

        q, k, v = product("q"), product("k"), product("v")
        if a.qk_norm:
            q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
        cos, sin = self._angles.at(torch.arange(num_tokens))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        if a.window is not None:
            seen = seen.triu(1 - a.window)
        groups = a.num_heads // a.num_kv_heads
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(groups, dim=1).transpose(0, 1),
            v.repeat_interleave(groups, dim=1).transpose(0, 1),
            attn_mask=seen,
        )
        return attended.transpose(0, 1).reshape(num_tokens, -1)

    def read_by_gate_up(self, x: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        """`[tokens, hidden]`, attention added, to what gate and up read."""
        return self._norm(x, layer["mlp_norm"])

    def read_by_down(self, normed: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        """What gate and up read to what down reads."""
        gate = F.linear(normed, layer["gate"])
        gate = F.silu(gate) if self._a.activation == "silu" else F.gelu(gate, approximate="tanh")
        return gate.mul_(F.linear(normed, layer["up"]))

    def __call__(self, x: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        """The whole layer over one sequence `[tokens, hidden]`."""
        attended = self.read_by_o(self.read_by_qkv(x, layer), layer)
        x = x + F.linear(attended, layer["o"])
        inner = self.read_by_down(self.read_by_gate_up(x, layer), layer)
        return x + F.linear(inner, layer["down"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._a.norm_eps)
