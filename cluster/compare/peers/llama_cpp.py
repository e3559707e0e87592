"""llama.cpp's server on this machine's CPU."""

from __future__ import annotations

from cluster.compare.peers import PeerOptions
from cluster.compare.peers.model import model_of, program
from cluster.compare.peers.process import PORT, ProcessSide
from cluster.config import ServeConfig
from engine.errors import ConfigError
from engine.text.source import resolve_source

INSTALL = (
    "build it (the source package llama-cpp-python carries it: pip download --no-binary :all: "
    "--no-deps llama-cpp-python, unpack, cmake -S vendor/llama.cpp -B build && cmake --build build "
    "--target llama-server), and say --peer-bin build/bin"
)

_SLOTS = 16
"""Requests at once: each takes a whole context of KV memory, so it is not our own 64."""


def llama_cpp_side(config: ServeConfig, options: PeerOptions) -> ProcessSide:
    """Raises ConfigError where it is not installed, or the model is no GGUF file."""
    server = program("llama-server", options, install=INSTALL)
    model = model_of(config)
    file = options.model
    if file is None:
        source = resolve_source(model.args.source)
        if source.kind != "gguf":
            raise ConfigError(
                f"{model.args.source}: llama.cpp reads .gguf files; convert it and say "
                "--peer-model FILE"
            )
        file = str(source.files)
    slots = min(_SLOTS, model.settings.max_running_requests)
    context = model.args.max_context_tokens or 2048
    command = [server, "-m", file, "--alias", model.name, "--host", "127.0.0.1", "--port", PORT]
    command += ["-t", str(model.threads), "-tb", str(model.threads)]
    command += ["-np", str(slots), "-c", str(slots * context)]
    command += ["-b", str(model.settings.max_step_tokens), "-fa", "on", "--no-webui"]
    return ProcessSide(
        "llama.cpp",
        [*command, *options.arguments],
        notes=[f"{model.threads} threads, {slots} slots of {context} tokens, weights of {file}"],
    )
