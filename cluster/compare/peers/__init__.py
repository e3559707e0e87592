"""Other servers to be compared with, started here for the time of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.compare.sides import Side
    from cluster.config import ServeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What the operator says of a peer."""

    bin: Path | None = None
    """Directory with its programs; None: where this command's own are, then PATH."""

    model: str | None = None
    """Weights in its own form; None: made from our configuration's."""

    arguments: Sequence[str] = ()
    """Added to its command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    text: str
    make: Callable[[ServeConfig, PeerOptions], Side]
    """Raises ConfigError where it is not installed, naming the command that installs it."""


def _vllm(config: ServeConfig, options: PeerOptions) -> Side:
    from cluster.compare.peers.vllm import vllm_side

    return vllm_side(config, options)


def _llama_cpp(config: ServeConfig, options: PeerOptions) -> Side:
    from cluster.compare.peers.llama_cpp import llama_cpp_side

    return llama_cpp_side(config, options)


def _transformers(config: ServeConfig, options: PeerOptions) -> Side:
    from cluster.compare.peers.transformers_serve import transformers_side

    return transformers_side(config, options)


PEERS: dict[str, Peer] = {
    "vllm": Peer(text="vLLM's own server on the CPU", make=_vllm),
    "llama.cpp": Peer(text="llama.cpp's server, with the weights as the file has them",
                      make=_llama_cpp),
    "transformers": Peer(text="transformers' generate behind a plain Ray Serve deployment",
                         make=_transformers),
}  # fmt: skip


def peer_side(name: str, config: ServeConfig, options: PeerOptions) -> Side:
    """Raises ConfigError for a peer that is not known or not installed."""
    if name not in PEERS:
        raise ConfigError(f"--peer {name!r}: there are {', '.join(PEERS)}")
    return PEERS[name].make(config, options)
