"""Writes a model source as a directory for `from_pretrained`.

    python -m cluster.compare.peers.export SOURCE DTYPE DIRECTORY

So that peers compute with the very weights that our engine unpacks from a quantised file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.text.source import resolve_source
from engine.weights.load import load_checkpoint
from engine.weights.writing import model_config, stored_tensor_name


def export(source: str, dtype: str, directory: Path) -> None:
    """Raises ConfigError for a model that is no GGUF file, or that transformers lacks."""
    file = resolve_source(source).files
    checkpoint = load_checkpoint(source, getattr(torch, dtype))
    if file.suffix != ".gguf":
        raise ConfigError(f"{file}: not a .gguf file; transformers reads it as it is")
    config = model_config(checkpoint.architecture, getattr(torch, dtype))
    # Made beside and moved into place: a directory that is there is whole.
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".new-"))
    try:
        tensors = {stored_tensor_name(name): tensor for name, tensor in checkpoint.tensors.items()}
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=1))
        # From the file as transformers itself reads it, chat template included.
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(made)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
