"""Which attention a device gets: a row a backend, and the reason where there is none.

A feature that a backend lacks is refused at start-up, never ignored. Sources: flash-attn 2.8.3,
`csrc/flash_attn/flash_api.cpp`; torch 2.13, `torch/nn/attention/varlen.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from engine.errors import ConfigError

AttentionName = Literal["cpu", "flash", "varlen", "triton"]

SM80 = (8, 0)
SM89 = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a process found out about the device it computes on."""

    kind: Literal["cpu", "cuda"]
    compute: tuple[int, int] = (0, 0)
    """Compute capability, `(9, 0)` for Hopper."""

    missing: Mapping[str, str]
    """Packages that cannot be imported here, each with the reason."""

    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a model and its pool ask of attention."""

    dtype: str
    """Of activations: `bfloat16`, `float32`, ..."""

    kv_dtype: str
    head_dim: int
    block_tokens: int
    window: bool = False
    softcap: bool = False
    graphs: bool = False
    """Decode steps are to be captured as CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapabilities:
    """Of one backend."""

    kind: Literal["cpu", "cuda"]
    package: str | None
    compute: tuple[int, int]
    """Least compute capability."""

    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    """Besides that of the activations."""

    block_multiple: int
    """Tokens a block must be a multiple of."""

    max_head_dim: int
    head_dim_multiple: int
    softcap: bool = True
    window: bool = True
    graphs: bool = True
    graph_block_multiple: int = 1
    """The same in a captured graph."""

    kv_compute: Mapping[str, tuple[int, int]]
    """Least compute capability of a KV type where it is above `compute`."""


_NO_LIMITS: Final[Mapping[str, tuple[int, int]]] = {}

ATTENTION: Final[Mapping[AttentionName, AttentionCapabilities]] = {
    # In the order of preference on a GPU.
    "flash": AttentionCapabilities(
        kind="cuda",
        package="flash_attn",
        compute=SM80,
        dtypes=("bfloat16", "float16"),
        kv_dtypes=(),
        block_multiple=256,
        max_head_dim=256,
        head_dim_multiple=8,
        kv_compute=_NO_LIMITS,
    ),
    "varlen": AttentionCapabilities(
        kind="cuda",
        package=None,
        compute=SM80,
        dtypes=("bfloat16", "float16"),
        kv_dtypes=(),
        block_multiple=1,  # others than multiples of 256 are gathered first
        graph_block_multiple=256,
        max_head_dim=256,
        head_dim_multiple=8,
        softcap=False,
        kv_compute=_NO_LIMITS,
    ),
    "triton": AttentionCapabilities(
        kind="cuda",
        package="triton",
        compute=SM80,
        dtypes=("bfloat16", "float16", "float32"),
        kv_dtypes=("int8", "float8_e4m3fn"),
        block_multiple=1,
        max_head_dim=256,
        head_dim_multiple=1,
        kv_compute={"float8_e4m3fn": SM89},
    ),
    "cpu": AttentionCapabilities(
        kind="cpu",
        package=None,
        compute=(0, 0),
        dtypes=("float32", "bfloat16", "float16", "float64"),
        kv_dtypes=(),
        block_multiple=1,
        max_head_dim=1 << 20,
        head_dim_multiple=1,
        graphs=False,
        kv_compute=_NO_LIMITS,
    ),
}


def lacks(name: AttentionName, device: Device, needs: AttentionNeeds) -> str | None:
    """What keeps this backend from serving `needs` on `device`. None: nothing."""
    can = ATTENTION[name]
    if can.kind != device.kind:
        return f"computes on {can.kind}, the device is {device.kind}"
    if can.package is not None and can.package in device.missing:
        return device.missing[can.package]
    if device.compute < can.compute:
        return f"needs compute capability {_dotted(can.compute)}, {_named(device)}"
    kv_compute = can.kv_compute.get(needs.kv_dtype, can.compute)
    other_kv = needs.kv_dtype != needs.dtype
    lines = [
        (needs.dtype in can.dtypes, f"dtype {needs.dtype} (only {', '.join(can.dtypes)})"),
        (
            not other_kv or needs.kv_dtype in can.kv_dtypes,
            f"KV in {needs.kv_dtype} (only {', '.join((needs.dtype, *can.kv_dtypes))})",
        ),
        (
            not other_kv or device.compute >= kv_compute,
            f"KV in {needs.kv_dtype} below compute capability {_dotted(kv_compute)} "
            f"({_named(device)})",
        ),
        (
            needs.block_tokens % can.block_multiple == 0,
            f"block_tokens={needs.block_tokens} (only multiples of {can.block_multiple})",
        ),
        (
            needs.head_dim <= can.max_head_dim and needs.head_dim % can.head_dim_multiple == 0,
            f"heads of {needs.head_dim} (only multiples of {can.head_dim_multiple} up to "
            f"{can.max_head_dim})",
        ),
        (can.softcap or not needs.softcap, "soft-capped scores"),
        (can.window or not needs.window, "sliding windows"),
        (can.graphs or not needs.graphs, "CUDA graphs"),
        (
            not needs.graphs or needs.block_tokens % can.graph_block_multiple == 0,
            f"CUDA graphs with block_tokens={needs.block_tokens} (only multiples of "
            f"{can.graph_block_multiple})",
        ),
    ]
    missing = [line for present, line in lines if not present]
    return f"does not do {'; '.join(missing)}" if missing else None


def choose(
    device: Device, needs: AttentionNeeds, wanted: AttentionName | Literal["auto"] = "auto"
) -> AttentionName:
    """The first backend of the table that does all of it, or `wanted`.

    Raises ConfigError with the reason of each that was asked.
    """
    names: tuple[AttentionName, ...] = tuple(ATTENTION) if wanted == "auto" else (wanted,)
    reasons: list[str] = []
    for name in names:
        reason = lacks(name, device, needs)
        if reason is None:
            return name
        if wanted != "auto" or ATTENTION[name].kind == device.kind:
            reasons.append(f"{name} {reason}")
    ways = _ways_out(device, needs)
    raise ConfigError(f"attention={wanted!r}: {'; '.join(reasons)}: {ways}")


def _ways_out(device: Device, needs: AttentionNeeds) -> str:
    if device.kind == "cuda" and device.compute < SM80:
        return "serve this model on a newer GPU, or with accelerator: cpu"
    if needs.block_tokens % 256 and "triton" in device.missing:
        return "use block_tokens: 256, install triton, or set cuda_graphs: false"
    return "use attention: auto, another dtype or block_tokens, or install what is missing"


def _dotted(compute: tuple[int, int]) -> str:
    return f"{compute[0]}.{compute[1]}"


def _named(device: Device) -> str:
    return f"{device.name or 'this device'} has {_dotted(device.compute)}"
