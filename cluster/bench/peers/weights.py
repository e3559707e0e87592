"""Writes one model's weights in every form that the compared engines read.

    python -m cluster.bench.peers.weights SOURCE DIRECTORY [SHAPE]

All forms hold the same bfloat16 numbers: those of `safetensors` and `bf16.gguf` are they, the
quantised files are rounded from them. Imports torch, transformers and gguf.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from numpy.typing import NDArray

from cluster.bench.peers.forms import GGUF_TYPES, Forms, Shape
from cluster.compare.peers.export import export
from engine.errors import ConfigError
from engine.text.source import resolve_source

_TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Fields of a file that the writer says itself."""

Floats = NDArray[np.float32]
Tensors = Iterator[tuple[str, Floats]]


def write_forms(source: str, directory: Path, shape: Shape | None = None) -> Forms:
    """Write what is not there yet. With a `shape`: random weights of that shape, with the source's
    tokenizer.

    Raises ConfigError for a source that is no GGUF file of a llama.
    """
    file = resolve_source(source).files
    if file.suffix != ".gguf":
        raise ConfigError(f"{file}: not a .gguf file; give the model as one")
    reader = gguf.GGUFReader(file)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file}: {architecture}: only llama is written in all forms")
    forms = Forms(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for kind in GGUF_TYPES:
        if not forms.gguf(kind).exists():
            tensors = _stored(reader) if shape is None else _random(shape, _vocab(reader))
            _write(reader, kind, tensors, shape, forms.gguf(kind))
    if not (forms.safetensors / "config.json").exists():
        export(str(forms.gguf("bf16")), "bfloat16", forms.safetensors)
    return forms


def _stored(reader: gguf.GGUFReader) -> Tensors:
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # The reader has the fastest dimension first.
        yield tensor.name, values.reshape([int(n) for n in reversed(tensor.shape)])


def _random(shape: Shape, vocab: int) -> Tensors:
    """Of the spread that keeps activations near one."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)

    ones = np.ones(shape.hidden, dtype=np.float32)
    kv = shape.hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", matrix(vocab, shape.hidden)
    yield "output_norm.weight", ones
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", ones
        yield f"{block}.ffn_norm.weight", ones
        yield f"{block}.attn_q.weight", matrix(shape.hidden, shape.hidden)
        yield f"{block}.attn_k.weight", matrix(kv, shape.hidden)
        yield f"{block}.attn_v.weight", matrix(kv, shape.hidden)
        yield f"{block}.attn_output.weight", matrix(shape.hidden, shape.hidden)
        yield f"{block}.ffn_gate.weight", matrix(shape.inner, shape.hidden)
        yield f"{block}.ffn_up.weight", matrix(shape.inner, shape.hidden)
        yield f"{block}.ffn_down.weight", matrix(shape.hidden, shape.inner)


def _write(
    reader: gguf.GGUFReader, kind: str, tensors: Tensors, shape: Shape | None, path: Path
) -> None:
    made = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
    try:
        writer = gguf.GGUFWriter(made / "model.gguf", "llama")
        changed = {} if shape is None else shape.fields()
        for name, field in reader.fields.items():
            if name.startswith(_OWN_FIELDS) or name in changed:
                continue
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
        for name, value in changed.items():
            writer.add_uint32(name, value)
        writer.add_file_type(_FILE_TYPES[kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, values in tensors:
            stored = _type_of(name, values, kind)
            if stored is gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, values)
                continue
            # Every form comes from the same bfloat16 numbers.
            bits = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            if stored is not gguf.GGMLQuantizationType.BF16:
                rounded = gguf.dequantize(bits, gguf.GGMLQuantizationType.BF16)
                bits = gguf.quantize(rounded.reshape(values.shape), stored)
            writer.add_tensor(name, bits, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(made / "model.gguf", path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _type_of(name: str, values: Floats, kind: str) -> gguf.GGMLQuantizationType:
    if values.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    if kind == "q4_0" and name in ("token_embd.weight", "output.weight"):
        # As llama.cpp's own tool does: with 4 bits the head costs more quality than all the rest.
        return gguf.GGMLQuantizationType.Q8_0
    return _TYPES[kind]


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ConfigError(f"the file has no field {name}; convert it again")
    return cast("Callable[[], Any]", field.contents)()


def _vocab(reader: gguf.GGUFReader) -> int:
    return len(_field(reader, "tokenizer.ggml.tokens"))


def main() -> None:
    source, directory, *rest = sys.argv[1:]
    shape = Shape(**json.loads(rest[0])) if rest else None
    write_forms(source, Path(directory), shape)


if __name__ == "__main__":
    main()
