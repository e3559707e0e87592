"""The compiled library, if there is one, and what it can do on this machine. No torch here."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final, Literal

from engine.errors import EngineError

Variant = Literal["portable", "avx2", "avx512"]

VARIANTS: Final[tuple[Variant, ...]] = ("portable", "avx2", "avx512")
"""In the order of their numbers, the slowest first."""

DTYPES: Final = ("float32", "bfloat16", "float64")
"""In the order of their numbers."""

PARTS: Final = (
    "embed",
    "attn_norm",
    "qkv",
    "qkv_bias",
    "qk_norm",
    "o",
    "mlp_norm",
    "gate_up",
    "down",
    "norm",
    "head",
)
"""In the order of their numbers."""

_ABI = 4


class NativeUnavailable(EngineError):
    """There is no native decoder for this machine or dtype; the message says why."""


class Shape(Structure):
    """`tailrace_shape` of `abi.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("vocab", "hidden", "layers", "heads", "kv_heads")),
        *((name, c_int64) for name in ("head_dim", "inner", "window")),
        ("norm_eps", c_double),
        *((name, c_int32) for name in ("qkv_bias", "qk_norm", "gelu_tanh")),
        *((name, c_int32) for name in ("dtype", "variant", "threads", "kv_codes")),
    )


class Codes(Structure):
    """`tailrace_codes` of `abi.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("bits", "group")),
        *((name, c_void_p) for name in ("codes", "scales", "minimums", "order")),
    )


class Step(Structure):
    """`tailrace_step` of `abi.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "requests", "columns", "sampled")),
        *((name, c_void_p) for name in ("ids", "positions", "slots", "last")),
        *((name, c_void_p) for name in ("cu_q", "kv_lens", "block_table", "cos", "sin")),
        ("angles", c_int64),
        ("pool", c_void_p),
        *((name, c_int64) for name in ("num_blocks", "block_tokens")),
        ("logits", c_void_p),
    )


def library_path() -> Path | None:
    """Where the library is that came with this package. None: it was not built."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_decoder{suffix}"
        if path.exists():
            return path
    return None


@cache
def load_library(path: Path | None) -> ctypes.CDLL:
    """The library at `path`, its functions declared. Raises NativeUnavailable.

    ctypes gives up the interpreter's lock during each call.
    """
    if path is None:
        raise NativeUnavailable(
            "the native decoder was not built when the package was installed: install a C++ "
            "compiler and the package again"
        )
    try:
        library = ctypes.CDLL(str(path))
        abi = int(library.tailrace_abi())
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the native decoder cannot be loaded: {error}") from error
    if abi != _ABI:
        raise NativeUnavailable(
            f"the native decoder at {path} is of another version (interface {abi}, not {_ABI}): "
            "install the package again"
        )
    counts, pointers = (c_int64, c_int64, c_int64), (c_void_p, c_void_p, c_void_p)
    declare = {
        "tailrace_variants": (c_uint32, (c_int32,)),
        "tailrace_create": (c_void_p, (POINTER(Shape),)),
        "tailrace_destroy": (None, (c_void_p,)),
        "tailrace_load": (c_char_p, (c_void_p, c_int32, c_int64, POINTER(c_void_p))),
        "tailrace_load_codes": (c_char_p, (c_void_p, c_int32, c_int64, POINTER(Codes))),
        "tailrace_step_run": (c_char_p, (c_void_p, POINTER(Step))),
        "tailrace_products": (c_char_p, (c_void_p, c_int64, c_int64)),
        "tailrace_linear": (c_char_p, (c_void_p, *counts, *pointers, c_void_p)),
        "tailrace_linear_codes": (
            c_char_p,
            (c_void_p, *counts, c_void_p, POINTER(Codes), c_void_p),
        ),
        "tailrace_gated": (c_char_p, (c_void_p, *counts, *pointers, c_void_p)),
        "tailrace_norm": (c_char_p, (c_void_p, c_int64, c_int64, *pointers)),
        "tailrace_attention": (
            c_char_p,
            (c_void_p, c_int64, POINTER(Step), c_void_p, c_void_p),
        ),
    }
    for name, (result, arguments) in declare.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def variants(dtype: str, path: Path | None = None) -> tuple[Variant, ...]:
    """What this processor can compute `dtype` with, the slowest first. Raises NativeUnavailable."""
    library = load_library(path or library_path())
    found = library.tailrace_variants(DTYPES.index(dtype)) if dtype in DTYPES else 0
    return tuple(name for number, name in enumerate(VARIANTS) if found >> number & 1)


def native_available(dtype: str) -> str | None:
    """None where the native decoder computes `dtype` here; otherwise the reason why not."""
    try:
        if variants(dtype):
            return None
    except NativeUnavailable as error:
        return str(error)
    return f"the native decoder does not compute {dtype}"
