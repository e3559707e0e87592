"""What each backend computes, in one place; what none computes is refused at start-up.

A backend that comes later (a GPU's) adds a row; a feature that not all have adds a column, and
`lacks` a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from engine.config import KVDType
from engine.models.architecture import Activation, Architecture
from engine.models.model import SCALE_BYTES

BackendName = Literal["native", "torch", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Of one backend, on the machine it needs."""

    dtypes: tuple[str, ...]
    """Of activations, and of weights that are no codes."""

    kv_dtypes: tuple[str, ...] = ()
    """Of keys and values, besides the dtype of activations. `int8`, `fp8`: codes, with a scale for
    each token's head."""

    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    window: bool = True
    qk_norm: bool = True
    qkv_bias: bool = True
    code_bits: tuple[int, ...] = ()
    """Codes it computes with as they are. Others it expands at load: the same weights, but as much
    memory as unquantised ones take."""

    code_groups: str = "none"


CAPABILITIES: Final[Mapping[BackendName, Capabilities]] = {
    "native": Capabilities(
        dtypes=("float32", "bfloat16", "float64"),
        kv_dtypes=("int8",),
        code_bits=(4, 8),
        code_groups="multiples of 32",
    ),
    "torch": Capabilities(dtypes=("float32", "bfloat16", "float64"), kv_dtypes=("int8",)),
    # What its attention backends and devices lack besides: `engine.attention.capabilities`.
    "gpu": Capabilities(
        dtypes=("float32", "bfloat16"),
        kv_dtypes=("int8", "fp8"),
        code_bits=(4, 8),
        code_groups="multiples of 32",
    ),
}


def lacks(
    backend: BackendName, architecture: Architecture, dtype: str, kv_dtype: KVDType = "auto"
) -> str | None:
    """What of a model this backend cannot compute, and what it can instead. None: nothing."""
    can = CAPABILITIES[backend]
    coded = kv_dtype in ("int8", "fp8")
    lines = [
        (dtype in can.dtypes, f"dtype {dtype}: only {', '.join(can.dtypes)}"),
        (
            architecture.activation in can.activations,
            f"activation {architecture.activation}: only {', '.join(can.activations)}",
        ),
        (can.window or architecture.window is None, "sliding windows"),
        (can.qk_norm or not architecture.qk_norm, "norms of q and k"),
        (can.qkv_bias or not architecture.qkv_bias, "biases of q, k and v"),
        (
            kv_dtype in ("auto", dtype, *can.kv_dtypes),
            f"kv_dtype {kv_dtype} with activations in {dtype}: only "
            f"{', '.join((dtype, *can.kv_dtypes))}",
        ),
        (
            not coded or architecture.head_dim % SCALE_BYTES == 0,
            f"kv_dtype {kv_dtype} for heads of {architecture.head_dim}: only multiples of "
            f"{SCALE_BYTES}, behind which scales are aligned",
        ),
    ]
    missing = [line for present, line in lines if not present]
    return f"{backend} does not compute {'; '.join(missing)}" if missing else None
