"""The two kinds of configuration of a deployment, as values.

`args` needs new processes when it changes; `PoolSettings` is `user_config`, applied in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError

ROOT_DEPLOYMENT = "Root"
"""Of a model application: never called, never started, of no interest to anybody. See `app`."""


REPLICA_CPUS = 0.5
"""Of a replica with ranks, itself: the first bundle of its placement group."""

RANK_CPUS = 0.5
"""Of each of its ranks: the other bundles."""


def rank_bundles(num_ranks: int, accelerator: str = "cpu") -> list[dict[str, float]]:
    """A replica's placement group: itself, then its ranks, each with a GPU where they compute on
    one. Empty where the replica computes itself."""
    if num_ranks == 1:
        return []
    rank: dict[str, float] = {"CPU": RANK_CPUS}
    if accelerator == "gpu":
        rank["GPU"] = 1
    return [{"CPU": REPLICA_CPUS}, *(dict(rank) for _ in range(num_ranks))]


def block_tokens_of(args: Mapping[str, Any]) -> Any:
    """Of a model's `args` as they are written, defaults filled in."""
    return args.get("block_tokens", 256 if args.get("accelerator") == "gpu" else 16)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LinkArgs(_Strict):
    """Where a replica's link listens."""

    host: str = "127.0.0.1"
    """Address to bind. On a cluster of several hosts: 0.0.0.0."""

    advertise_host: str | None = None
    """Address that others dial. None: the node's own, or 127.0.0.1 when bound there."""

    first_port: int | None = Field(default=None, ge=1, le=65_535)
    """None: any free port. Otherwise the first free one from here to `last_port`. On its node each
    replica needs one, and each model's two queues."""

    last_port: int | None = Field(default=None, ge=1, le=65_535)

    @model_validator(mode="after")
    def _ports_make_a_range(self) -> LinkArgs:
        if (self.first_port is None) != (self.last_port is None):
            raise ValueError("first_port and last_port go together")
        if self.first_port and self.last_port and self.first_port > self.last_port:
            raise ValueError(f"first_port={self.first_port} is above last_port={self.last_port}")
        return self

    @property
    def ports(self) -> range | None:
        if self.first_port is None or self.last_port is None:
            return None
        return range(self.first_port, self.last_port + 1)


class ModelArgs(_Strict):
    """`args` of a model application."""

    name: str = Field(min_length=1, max_length=256)
    source: str = Field(min_length=1)
    """`package:NAME`, a `.gguf` file, a directory with safetensors, or a built-in model."""

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    backend: Literal["auto", "native", "torch"] = "auto"
    """`native` is refused where it can't be had, `auto` then takes `torch`."""

    quantisation: Literal["keep", "none", "int8", "int4", "fp8"] = "keep"
    """Of the matrices: as the file stores them, numbers of `dtype`, or codes rounded at load. fp8:
    on GPUs."""

    quantisation_group: Literal[32, 64, 128] | None = None
    """Inputs that share a scale, with int8 and int4. None: 32."""

    kv_dtype: Literal["auto", "float64", "float32", "bfloat16", "int8", "fp8"] = "auto"
    """Of keys and values: the dtype of activations, or codes of 8 bits with scales; fp8 on GPUs."""

    accelerator: Literal["cpu", "gpu"] = "cpu"
    """`gpu`: each replica needs one (`ray_actor_options: {num_gpus: 1}`), each rank gets one."""

    attention: Literal["auto", "flash", "varlen", "triton"] = "auto"
    """On a GPU: flash-attn (blocks of a multiple of 256 tokens), torch's own kernel, or Triton's.
    `auto`: the first that does what the model needs."""

    cuda_graphs: bool = True
    """On a GPU: record decode steps at start-up and repeat them."""

    max_context_tokens: int | None = Field(default=None, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    kv_memory_bytes: int | None = Field(default=None, ge=1)
    """Of each replica's KV pool; refused at start-up where it does not fit. None: the fraction."""

    kv_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Of the memory that a starting replica finds free beside its weights, less what others on its
    host are about to take. None: a tenth on a CPU, nine tenths on a GPU."""

    block_tokens: int = Field(default=16, ge=1)
    """Tokens of KV in a block, also the unit of prefix hashing. On a GPU 256 unless it is given:
    what flash-attn reads."""

    num_blocks: int | None = Field(default=None, ge=2)
    prefix_caching: bool = True
    reuse_tokens: int | None = Field(default=None, ge=1)
    """Of large blocks that two prompts share in part, so many leading tokens at a time are copied.
    It divides `block_tokens`. None: 32 where blocks are a larger multiple of it."""

    num_threads: int | None = Field(default=None, ge=1)
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Ranks that share each layer of a replica's model, each a process."""

    pipeline_parallel: int = Field(default=1, ge=1, le=64)
    """Stages of layers, each of `tensor_parallel` ranks."""

    prefill_tensor_parallel: int | None = Field(default=None, ge=1, le=64)
    """Of prefill replicas, if it is to differ from decode's."""

    prefill_pipeline_parallel: int | None = Field(default=None, ge=1, le=64)
    prefill: bool = True
    """False: no prefill pool, decode replicas compute prompts themselves."""

    transport: Literal["link", "nixl"] = "link"
    """What carries KV: the link between two replicas, or READs by NIXL (RDMA, shared memory, GPU
    memory), with the link for everything that is said about them. With several ranks each reads
    what it holds, stages of any sizes whole; where `tensor_parallel` of both pools differs it is
    read token by token, which takes ten times as long a byte and more."""

    link: LinkArgs = LinkArgs()

    @model_validator(mode="before")
    @classmethod
    def _blocks_suit_the_accelerator(cls, args: Any) -> Any:
        if isinstance(args, Mapping):
            written = cast("Mapping[str, Any]", args)
            return {**written, "block_tokens": block_tokens_of(written)}
        return args

    @model_validator(mode="after")
    def _sizes_agree(self) -> ModelArgs:
        if self.reuse_tokens is not None and self.block_tokens % self.reuse_tokens:
            raise ValueError(
                f"reuse_tokens={self.reuse_tokens}: must divide block_tokens={self.block_tokens}: "
                "take a divisor, or leave it out"
            )
        if self.kv_memory_fraction is not None:
            for name in ("kv_memory_bytes", "num_blocks"):
                if (size := getattr(self, name)) is not None:
                    raise ValueError(
                        f"kv_memory_fraction={self.kv_memory_fraction:g} and {name}={size}: the "
                        "pool has one size: leave one of them out"
                    )
        return self

    @model_validator(mode="after")
    def _ranks_are_possible(self) -> ModelArgs:
        if max(self.num_ranks, self.of_prefill().num_ranks) == 1:
            return self
        if self.source in ("fake", "synthetic"):
            raise ValueError(f"source={self.source!r} has no parts for ranks: use one rank")
        if self.backend == "native":
            raise ValueError("backend='native' computes on one rank only: use 'auto' or 'torch'")
        return self

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def of_prefill(self) -> ModelArgs:
        """The same, as prefill replicas are to take it."""
        return self.model_copy(
            update={
                "tensor_parallel": self.prefill_tensor_parallel or self.tensor_parallel,
                "pipeline_parallel": self.prefill_pipeline_parallel or self.pipeline_parallel,
                "cuda_graphs": False,  # of decode steps
            }
        )

    def engine_config(
        self, scheduler: SchedulerConfig, *, memory_limit_bytes: int | None = None
    ) -> EngineConfig:
        """The engine's own value. Raises ConfigError for what only it can judge.

        memory_limit_bytes: what the replica declares that it takes in all, if it does.
        """
        return EngineConfig(
            model=ModelConfig(
                name=self.name,
                source=self.source,
                dtype=self.dtype,
                accelerator=self.accelerator,
                attention=self.attention,
                backend=self.backend,
                quantisation=self.quantisation,
                quantisation_group=self.quantisation_group,
                kv_dtype=self.kv_dtype,
            ),
            max_context_tokens=self.max_context_tokens,
            max_output_tokens=self.max_output_tokens,
            kv_memory_bytes=self.kv_memory_bytes,
            kv_memory_fraction=self.kv_memory_fraction,
            memory_limit_bytes=memory_limit_bytes,
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            prefix_caching=self.prefix_caching,
            reuse_tokens=self.reuse_tokens,
            cuda_graphs=self.cuda_graphs,
            scheduler=scheduler,
            num_threads=self.num_threads,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            kv_reads=self.transport == "nixl" and self.prefill,
        )


class GatewayArgs(_Strict):
    """`args` of the gateway application."""

    link: LinkArgs = LinkArgs()


class PoolSettings(_Strict):
    """`user_config` of `Prefill` and `Decode`."""

    revision: int = Field(default=0, ge=0)
    max_running_requests: int = Field(default=64, ge=1)
    """Choices that run at once; on decode replicas also the slots that admission hands out."""

    max_waiting_requests: int = Field(default=1024, ge=0)
    max_step_tokens: int = Field(default=512, ge=1)
    max_chunk_tokens: int = Field(default=256, ge=1)
    ageing_s: float = Field(default=10.0, gt=0)
    urgent_kv_reserve: float = Field(default=0.125, ge=0, lt=1)
    """Prefill: share of the KV pool that prompts leave to more urgent ones than themselves. Slots
    they give back within a step, blocks not before they are computed and sent."""

    pacing: bool = True
    """How much prompt a step holds follows the targets of its requests, within these limits."""

    min_prompt_tokens: int = Field(default=16, ge=1)
    """With pacing: what a step gives to prompts however late its streams are."""

    overlap: bool = False
    """Plan the next step, and write out the text of the last, while one is computed: the same
    tokens. Worth it where a core is left beside those that compute. Refused for ranks of one stage,
    which plan each step after the last; several stages have a plan each under way anyhow."""

    local_prefill_tokens: int = Field(default=64, ge=0)
    """Decode: a missing part of a prompt up to this long is not worth sending away."""

    max_pull_attempts: int = Field(default=2, ge=1)
    max_fallback_tokens: int = Field(default=1_000_000, ge=0)
    """Decode: the longest missing part it computes itself when every pull failed."""

    pull_stall_s: float = Field(default=10.0, gt=0)
    """Decode: a transfer whose prompt is computed and that sends no byte for this long has
    failed."""

    pull_silence_s: float = Field(default=5.0, ge=2.0)
    """Decode: a transfer whose prompt is not computed yet, and that neither sends a byte nor is
    said to wait or to be computed for this long, has failed. Prefill says so every second."""

    transfer_window_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    """Decode: bytes of one transfer that may be unacknowledged."""

    step_limit_s: float = Field(default=60.0, ge=1.0)
    """A step of the engine that runs longer never ends: the replica is given up and replaced. Above
    the longest prompt chunk on the slowest machine."""

    rank_silence_s: float = Field(default=10.0, ge=2.0)
    """A rank that gives no sign of life for this long is lost, and its replica with it. Ranks give
    one a second, whatever they compute."""

    max_unacked_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    """Prefill: the same over all transfers of a replica."""

    metrics: bool = True
    """False: nothing is recorded and gateways are told nothing, for comparison."""

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_running_requests=self.max_running_requests,
            max_waiting_requests=self.max_waiting_requests,
            max_step_tokens=self.max_step_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            ageing_s=self.ageing_s,
            urgent_kv_reserve=self.urgent_kv_reserve,
            pacing=self.pacing,
            min_prompt_tokens=self.min_prompt_tokens,
            overlap=self.overlap,
        )

    @classmethod
    def parse(cls, user_config: Mapping[str, Any] | None) -> PoolSettings:
        """Raises ConfigError naming each field at fault and its value."""
        try:
            return cls.model_validate(user_config or {})
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
            )
            raise ConfigError(f"user_config of the pool: {faults}") from error
