"""What distinguishes one decoder of the Llama family from another, as a value.

Canonical tensor names, which every weight loader delivers and the decoder reads:

    embed                       [vocab, hidden]
    layers.{i}.attn_norm        [hidden]
    layers.{i}.{q,k,v,o}        [out, in]   q, k: rows in the half-split order of transformers
    layers.{i}.{q,k,v}.bias     [out]       with `qkv_bias`
    layers.{i}.{q,k}_norm       [head_dim]  with `qk_norm`
    layers.{i}.mlp_norm         [hidden]
    layers.{i}.{gate,up,down}   [out, in]
    norm                        [hidden]
    head                        [vocab, hidden]; absent with `tied_embeddings`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 (`rope_type: llama3` of transformers)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ConfigError(f"rope factor={self.factor}: must be 1 or more")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor={self.low_freq_factor}, high_freq_factor="
                f"{self.high_freq_factor}: need 0 < low < high"
            )
        if self.original_context_tokens < 1:
            raise ConfigError(
                f"rope original_context_tokens={self.original_context_tokens}: must be 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding over the whole head (half-split pairs)."""

    theta: float
    llama3: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0.0:
            raise ConfigError(f"rope theta={self.theta}: must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape and arithmetic of one decoder. Raises `ConfigError` on a shape that cannot exist."""

    name: str
    """Family, for messages and metrics: `llama`, `qwen2`, `qwen3`, `mistral`, ..."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: Rope
    max_context_tokens: int
    """Positions the model was trained for."""

    tied_embeddings: bool
    """The head is `embed`; there is no tensor `head`."""

    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before the rotation."""

    activation: Activation = "silu"
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` tokens before it. None: no limit."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_context_tokens",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{self.name}: {name}={value}: must be 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"{self.name}: head_dim={self.head_dim}: rotation needs an even size")
        if not self.norm_eps > 0.0:
            raise ConfigError(f"{self.name}: norm_eps={self.norm_eps}: must be positive")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ConfigError(
                f"{self.name}: activation={self.activation!r}: silu and gelu_tanh are supported"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"{self.name}: window={self.window}: must be 1 or more, or None")
        specials = [("eos_token_ids", token) for token in self.eos_token_ids]
        if self.bos_token_id is not None:
            specials.append(("bos_token_id", self.bos_token_id))
        for name, token in specials:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"{self.name}: {name} holds {token}: "
                    f"must lie below vocab_size={self.vocab_size}"
                )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name and shape of every tensor this decoder needs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "attn_norm": (hidden,),
                "q": (self.q_size, hidden),
                "k": (self.kv_size, hidden),
                "v": (self.kv_size, hidden),
                "o": (hidden, self.q_size),
                "mlp_norm": (hidden,),
                "gate": (inner, hidden),
                "up": (inner, hidden),
                "down": (hidden, inner),
            }
            if self.qkv_bias:
                layer |= {
                    "q.bias": (self.q_size,),
                    "k.bias": (self.kv_size,),
                    "v.bias": (self.kv_size,),
                }
            if self.qk_norm:
                layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["norm"] = (hidden,)
        if not self.tied_embeddings:
            shapes["head"] = (self.vocab_size, hidden)
        return shapes
