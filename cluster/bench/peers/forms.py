"""Where the forms of one model's weights lie."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from engine.errors import ConfigError
from engine.text.source import resolve_source

GGUF_TYPES = ("bf16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A llama of random weights: speed does not depend on their values."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`LAYERS,HIDDEN,HEADS,KV_HEADS,INNER`. Raises ConfigError."""
        try:
            layers, hidden, heads, kv_heads, inner = (int(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(
                f"--random {text!r}: give LAYERS,HIDDEN,HEADS,KV_HEADS,INNER, such as "
                "22,2048,32,4,5632"
            ) from None
        shape = cls(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, inner=inner)
        if min(asdict(shape).values()) < 1 or hidden % heads or heads % kv_heads:
            raise ConfigError(
                f"--random {text!r}: heads must divide the hidden size, key heads the heads"
            )
        if hidden % 32 or inner % 32:
            raise ConfigError(f"--random {text!r}: sizes must be multiples of 32")
        return shape

    def fields(self) -> dict[str, int]:
        """As GGUF names them."""
        return {
            "llama.block_count": self.layers,
            "llama.embedding_length": self.hidden,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.feed_forward_length": self.inner,
            "llama.rope.dimension_count": self.hidden // self.heads,
        }

    def __str__(self) -> str:
        return f"random-{self.layers}x{self.hidden}-{self.heads}-{self.kv_heads}-{self.inner}"


@dataclass(frozen=True, slots=True)
class Forms:
    """Of one model, below `directory`."""

    directory: Path

    @property
    def safetensors(self) -> Path:
        """As `from_pretrained` wants it, in bfloat16."""
        return self.directory / "safetensors"

    def gguf(self, kind: str) -> Path:
        """`kind` is one of GGUF_TYPES."""
        return self.directory / f"{kind}.gguf"

    @property
    def whole(self) -> bool:
        files = [self.gguf(kind) for kind in GGUF_TYPES]
        return all(file.exists() for file in (*files, self.safetensors / "config.json"))


def forms_of(source: str, shape: Shape | None = None, directory: Path | None = None) -> Forms:
    """The weights in all forms, written once and kept. Raises ConfigError."""
    name = resolve_source(source).name if shape is None else str(shape)
    if directory is None:
        directory = Path(platformdirs.user_cache_dir("tailrace", appauthor=False)) / "forms" / name
    forms = Forms(directory)
    if forms.whole:
        return forms
    # In a process of its own: torch and transformers stay out of this one.
    command = [sys.executable, "-m", "cluster.bench.peers.weights", source, str(directory)]
    if shape is not None:
        command.append(json.dumps(asdict(shape)))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"{source}: its weights cannot be written in all forms:\n{done.stderr.strip()[-2000:]}"
        )
    return forms
