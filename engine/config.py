"""The engine's configuration: frozen, validated, with every limit an operator needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError
from engine.models.shard import Grid

DType = Literal["auto", "float32", "bfloat16", "float64"]
Backend = Literal["auto", "native", "torch"]
Quantisation = Literal["keep", "none", "int8", "int4", "fp8"]
Accelerator = Literal["cpu", "gpu"]
Attention = Literal["auto", "flash", "varlen", "triton"]

KVDType = Literal["auto", "float64", "float32", "bfloat16", "int8", "fp8"]

QUANTISATION_GROUPS = (32, 64, 128)

DEFAULT_REUSE_TOKENS = 32


def _at_least(name: str, value: float, low: float, why: str = "") -> None:
    if not value >= low:
        raise ConfigError(f"{name}={value}: must be {low:g} or more{': ' + why if why else ''}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, in which arithmetic."""

    name: str
    """What clients call it."""

    source: str
    """`package:NAME` (weights inside an installed Python package), a path to a `.gguf` file or to a
    directory with `config.json` and safetensors, or a built-in: `fake`, `tiny`, `synthetic`."""

    dtype: DType = "auto"
    """`auto`: bfloat16 where the CPU multiplies it natively, else float32."""

    accelerator: Accelerator = "cpu"
    """Where it is computed. A `gpu` needs CUDA and a device that this process sees; `dtype: auto`
    is bfloat16 there."""

    attention: Attention = "auto"
    """On a GPU: flash-attn, torch's own kernel or Triton's. `auto`: the first of them that does
    what the model and its pool need; start-up says which, and why none does."""

    backend: Backend = "auto"
    """What computes a step: `torch`, or the package's own `native` code (refused where it was not
    built or lacks the dtype). `auto`: native for bfloat16 and float32 where possible. Their KV
    differs by rounding only and may be exchanged."""

    quantisation: Quantisation = "keep"
    """What the matrices are kept as. `keep`: what the file stores, as codes where it is quantised
    (and codes lose nothing); `none`: numbers of `dtype`; `int8`, `int4`: rounded to codes at load,
    each group of inputs with a scale (the head to int8 with either); `fp8`: e4m3 with a scale an
    output, on GPUs of compute capability 8.9 or more (the head stays in `dtype`)."""

    quantisation_group: int | None = None
    """Inputs that share a scale, with int8 and int4: 32, 64 or 128. None: 32."""

    kv_dtype: KVDType = "auto"
    """What keys and values are kept in. `auto`: the dtype of activations, the only one of numbers
    there is. `int8`: codes with a scale for each token's head, about half the memory and traffic of
    bfloat16. Its KV is exchanged with that of replicas with int8 only. `fp8`: e4m3 with the same
    scales, on GPUs whose attention reads it."""

    def __post_init__(self) -> None:
        if self.accelerator == "cpu":
            for name, value, other in (
                ("quantisation", self.quantisation == "fp8", "int8 or int4"),
                ("kv_dtype", self.kv_dtype == "fp8", "int8"),
                ("attention", self.attention != "auto", "auto"),
            ):
                if value:
                    raise ConfigError(
                        f"model {self.name!r}: {name}={getattr(self, name)!r} is for GPUs: use "
                        f"{other}, or accelerator: gpu"
                    )
        elif self.backend == "native":
            raise ConfigError(
                f"model {self.name!r}: backend='native' computes on CPUs: use auto, or "
                "accelerator: cpu"
            )
        group = self.quantisation_group
        if group is None:
            return
        if self.quantisation not in ("int8", "int4"):
            raise ConfigError(
                f"model {self.name!r}: quantisation_group={group} with quantisation="
                f"{self.quantisation!r}: groups are chosen for int8 and int4 only: leave it out"
            )
        if group not in QUANTISATION_GROUPS:
            raise ConfigError(
                f"model {self.name!r}: quantisation_group={group}: must be one of "
                f"{', '.join(map(str, QUANTISATION_GROUPS))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV memory exists and in what pieces."""

    num_blocks: int
    """Blocks. Block 0 is never handed out: padding writes land there."""

    block_tokens: int = 16
    """Tokens per block, which is also the unit of prefix hashing."""

    prefix_caching: bool = True
    reuse_tokens: int | None = None
    """Of a block that a prompt shares in part, runs of so many leading tokens are found and copied:
    it divides `block_tokens`. None: only whole blocks are shared. Large blocks, as GPU kernels want
    them, would otherwise find no prefix that is shorter."""

    def __post_init__(self) -> None:
        _at_least("num_blocks", self.num_blocks, 2, "block 0 is reserved")
        _at_least("block_tokens", self.block_tokens, 1)
        if self.reuse_tokens is not None:
            _at_least("reuse_tokens", self.reuse_tokens, 1)
            if self.block_tokens % self.reuse_tokens:
                raise ConfigError(
                    f"reuse_tokens={self.reuse_tokens}: must divide block_tokens="
                    f"{self.block_tokens}"
                )

    @property
    def capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    max_step_tokens: int = 512
    """Token budget of one forward pass, decode tokens and prompt chunks together."""

    max_chunk_tokens: int = 256
    """Largest share of a step that one prompt may take, so that running streams keep their pace."""

    ageing_s: float = 10.0
    """Waiting this long raises a request by one priority level."""

    urgent_kv_reserve: float = 0.125
    """Share of the KV pool that prompts computed for other replicas leave to more urgent ones: they
    cannot be preempted, since their blocks are being read. One more urgent than any of them may use
    it, and so may one that is alone."""

    pacing: bool = True
    """Let the targets of requests decide how much prompt a step holds (`scheduling.pacing`), up to
    the limits above. Requests without targets are not affected."""

    min_prompt_tokens: int = 16
    """With pacing: what a step gives to prompts however late its streams are."""

    overlap: bool = False
    """Plan the next step, and write out the text of the last, while one is computed. Tokens are the
    same. Worth it where a core is left beside those that compute. Refused for ranks of one stage,
    which plan each step after the last; several stages have a plan each under way anyhow."""

    def __post_init__(self) -> None:
        _at_least("min_prompt_tokens", self.min_prompt_tokens, 1)
        _at_least("max_running_requests", self.max_running_requests, 1)
        _at_least("max_waiting_requests", self.max_waiting_requests, 0)
        _at_least("max_step_tokens", self.max_step_tokens, 1)
        _at_least("max_chunk_tokens", self.max_chunk_tokens, 1)
        _at_least("ageing_s", self.ageing_s, 0.001)
        if not 0 <= self.urgent_kv_reserve < 1:
            raise ConfigError(
                f"urgent_kv_reserve={self.urgent_kv_reserve}: must be 0 or more and below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: model, limits, memory."""

    model: ModelConfig
    max_context_tokens: int | None = None
    """Prompt and output together. None: what the model was trained for."""

    max_output_tokens: int | None = None
    """None: whatever the context leaves."""

    kv_memory_bytes: int | None = None
    """Of the KV pool. More than is free is refused at start-up. None: `kv_memory_fraction`."""

    kv_memory_fraction: float | None = None
    """Of the memory that is free beside the loaded weights, for KV, but no more than all running
    requests could fill. None: a tenth on a CPU, nine tenths on a GPU."""

    memory_limit_bytes: int | None = None
    """What the process may hold in all, where its deployment declares it: free is what is below."""

    block_tokens: int = 16
    num_blocks: int | None = None
    """Overrides `kv_memory_bytes`."""

    prefix_caching: bool = True
    reuse_tokens: int | None = None
    """See `CacheConfig.reuse_tokens`. None: 32 where blocks are a larger multiple of that, else
    whole blocks; as many as `block_tokens`: whole blocks."""

    cuda_graphs: bool = True
    """On a GPU: decode steps are recorded once, at start-up, and repeated."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_threads: int | None = None
    """Compute threads, of each rank. None: one per core this process may use, shared by the ranks
    of this machine."""

    tensor_parallel: int = 1
    """Ranks that share each layer. KV heads go to ranks in runs as even as possible."""

    pipeline_parallel: int = 1
    """Stages of layers, each of `tensor_parallel` ranks."""

    kv_reads: bool = False
    """KV is read out of this engine's pool, or into it, by agents (`engine.transfer.nixl`): ranks
    get ready to have one."""

    def __post_init__(self) -> None:
        fraction = self.kv_memory_fraction
        if fraction is not None and not 0.0 < fraction <= 1.0:
            raise ConfigError(f"kv_memory_fraction={fraction}: must be above 0 and at most 1")
        if fraction is not None and (self.kv_memory_bytes or self.num_blocks):
            size = "num_blocks" if self.num_blocks else "kv_memory_bytes"
            raise ConfigError(
                f"kv_memory_fraction={fraction} and {size}={getattr(self, size)}: the pool has one "
                "size: leave one of them out"
            )
        _at_least("block_tokens", self.block_tokens, 1)
        for name in (
            *("max_context_tokens", "max_output_tokens", "num_threads"),
            *("kv_memory_bytes", "memory_limit_bytes"),
        ):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        _ = self.grid

    @property
    def resolved_reuse_tokens(self) -> int | None:
        """What the cache is told."""
        if self.reuse_tokens is not None:
            return self.reuse_tokens
        large = self.block_tokens > DEFAULT_REUSE_TOKENS
        fits = self.block_tokens % DEFAULT_REUSE_TOKENS == 0
        return DEFAULT_REUSE_TOKENS if large and fits else None

    @property
    def grid(self) -> Grid:
        """How ranks are arranged. Raises ConfigError for sizes out of range."""
        return Grid(tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel)
