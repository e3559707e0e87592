"""Compiles the Triton kernels for GPUs that need not be there, and prints what each takes.

Run by itself, with compute capabilities as arguments (80 90): the process that interprets kernels
cannot compile them.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_paged
from engine.models import triton_linear

LONG = {"kv_block", "scale_block"}


def compiled(name, kernel, pointers, constants, capability, warps=4, stages=2):
    """Bytes of shared memory that the kernel takes."""
    kinds = {}
    for argument in kernel.arg_names:
        if argument in constants:
            kinds[argument] = "constexpr"
        elif argument in ("scale", "softcap"):
            kinds[argument] = "fp32"
        else:
            kinds[argument] = pointers.get(argument, "i64" if argument in LONG else "i32")
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(f"{name} sm{capability} {made.metadata.shared}", flush=True)


def attention(kind, kv, itemsize, max_q, capability):
    group, dim = 4, 128
    cut = triton_paged.tiling(group, dim, max_q, 4096, itemsize)
    pointers = dict.fromkeys(("key_scales", "value_scales", "part_out"), "*fp32")
    pointers |= dict.fromkeys(("part_total", "part_top"), "*fp32")
    pointers |= dict.fromkeys(("table", "cu_q", "kv_lens"), "*i32")
    pointers |= {"q": f"*{kind}", "out": f"*{kind}", "keys": f"*{kv}", "values": f"*{kv}"}
    constants = {
        "LEFT": -1,
        "RIGHT": 0,
        "SOFTCAP": False,
        "SCALED": kv != kind,
        "SPLIT": cut.num_splits > 1,
        "SPLIT_SIZE": triton_paged.SPLIT_KEYS,
        "PAGE": 256,
        "DIM": dim,
        "BLOCK_D": dim,
        "GROUP": group,
        "BLOCK_Q": cut.queries,
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.keys,
        "PRECISION": "ieee" if itemsize > 2 else "tf32",
    }
    warps = 4 if cut.rows <= 64 else 8
    name = f"attention-{kind}-{kv}-{max_q}"
    compiled(name, triton_paged._attend, pointers, constants, capability, warps)


def product(bits, capability):
    pointers = {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "minimums": "*fp32"}
    constants = {
        "BITS": bits,
        "ZERO": 0 if bits == 4 else 128,
        "MINIMUMS": bits == 4,
        "GROUP": 64,
        "BLOCK_M": 16,
        "BLOCK_N": 64,
        "BLOCK_K": 64,
        "PRECISION": "tf32",
    }
    kernel = triton_linear._product
    compiled(
        f"product-{bits}", kernel, pointers | {"out": "*fp32"}, constants, capability, stages=3
    )
    for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "PRECISION"):
        del constants[name]
    constants["BLOCK"] = 1024
    numbers = pointers | {"out": "*bf16"}
    compiled(f"expand-{bits}", triton_linear._expand, numbers, constants, capability)


def main():
    for capability in map(int, sys.argv[1:]):
        attention("bf16", "bf16", 2, 1, capability)
        attention("bf16", "bf16", 2, 512, capability)
        attention("bf16", "i8", 2, 1, capability)
        if capability >= 89:
            attention("bf16", "fp8e4nv", 2, 1, capability)
        attention("fp32", "fp32", 4, 1, capability)
        pointers = {name: "*fp32" for name in ("part_out", "part_total", "part_top")}
        pointers["out"] = "*bf16"
        constants = {"DIM": 128, "BLOCK_D": 128}
        compiled("join", triton_paged._join, pointers, constants, capability)
        for bits in (4, 8):
            product(bits, capability)


if __name__ == "__main__":
    main()
