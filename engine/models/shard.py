"""Which part of a decoder one rank holds, as a value. Pure arithmetic: no torch.

```
                     tensor rank 0        tensor rank 1
stage 0   layers 0-14   heads 0-5  kv 0-1    heads 6-8  kv 2     (9 query heads, 3 KV heads)
stage 1   layers 15-29  heads 0-5  kv 0-1    heads 6-8  kv 2
```

Ranks are numbered stage by stage. Within a stage KV heads go to ranks in runs as even as possible,
each with the query heads that read it: nothing has to divide, only the largest part sets the pace.
With fewer KV heads than ranks, several ranks hold a copy of the same KV head and share out its
query heads; the first of them, its owner, hands it over in a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.models.architecture import Architecture

Span = tuple[int, int]
"""First and last, the last exclusive."""


def even_runs(count: int, parts: int) -> list[Span]:
    """`count` things in `parts` runs whose lengths differ by one at most, the longer ones first."""
    short, longer = divmod(count, parts)
    spans: list[Span] = []
    first = 0
    for part in range(parts):
        last = first + short + (part < longer)
        spans.append((first, last))
        first = last
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How many ranks compute one model together, and how they are arranged."""

    tensor_parallel: int = 1
    """Ranks that share each layer."""

    pipeline_parallel: int = 1
    """Stages: runs of layers, one after the other."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            value = getattr(self, name)
            if not 1 <= value <= 64:
                raise ConfigError(f"{name}={value}: must lie between 1 and 64")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def sampling_rank(self) -> int:
        """The first rank of the last stage: logits are gathered and tokens sampled there."""
        return self.num_ranks - self.tensor_parallel

    def stage_ranks(self, stage: int) -> list[int]:
        first = stage * self.tensor_parallel
        return list(range(first, first + self.tensor_parallel))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds, in the model's own numbering."""

    rank: int
    grid: Grid
    layers: Span
    heads: Span
    """Query heads, the columns of `o` with them."""

    kv_heads: Span
    owned_kv_heads: Span
    """Those of `kv_heads` that no rank before this one holds."""

    inner: Span
    """Rows of `gate` and `up`, columns of `down`."""

    vocab: Span
    """Rows of the embedding and of the head."""

    vocab_rows: int
    """Rows that every rank of the stage has, the last ones padded: gathered logits beyond the
    vocabulary are cut off."""

    @property
    def stage(self) -> int:
        return self.rank // self.grid.tensor_parallel

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.grid.tensor_parallel

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.grid.pipeline_parallel - 1

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def shards(architecture: Architecture, grid: Grid) -> tuple[Shard, ...]:
    """One for each rank. Raises ConfigError where a rank would hold nothing of a layer."""
    a, size = architecture, grid.tensor_parallel
    if grid.pipeline_parallel > a.num_layers:
        raise ConfigError(
            f"pipeline_parallel={grid.pipeline_parallel}: {a.name} has {a.num_layers} layers and "
            "each stage needs one: lower it"
        )
    if size > a.intermediate_size or size > a.vocab_size:
        raise ConfigError(
            f"tensor_parallel={size}: {a.name} has an inner size of {a.intermediate_size} and "
            f"{a.vocab_size} tokens to share out: lower it"
        )
    heads = _heads(a, size)
    layers = even_runs(a.num_layers, grid.pipeline_parallel)
    inner = even_runs(a.intermediate_size, size)
    rows = -(-a.vocab_size // size)
    return tuple(
        Shard(
            rank=stage * size + part,
            grid=grid,
            layers=layers[stage],
            heads=heads[part][0],
            kv_heads=heads[part][1],
            owned_kv_heads=heads[part][2],
            inner=inner[part],
            vocab=(min(part * rows, a.vocab_size), min((part + 1) * rows, a.vocab_size)),
            vocab_rows=rows,
        )
        for stage in range(grid.pipeline_parallel)
        for part in range(size)
    )


def _heads(a: Architecture, size: int) -> list[tuple[Span, Span, Span]]:
    """Query heads, KV heads and owned KV heads of each tensor rank."""
    group = a.num_heads // a.num_kv_heads
    if size <= a.num_kv_heads:
        runs = even_runs(a.num_kv_heads, size)
        return [
            ((first * group, last * group), (first, last), (first, last)) for first, last in runs
        ]
    # Fewer KV heads than ranks: runs of ranks share a KV head, each a run of its query heads.
    out: list[tuple[Span, Span, Span]] = []
    for kv_head, (first, last) in enumerate(even_runs(size, a.num_kv_heads)):
        copies = last - first
        if copies > group:
            raise ConfigError(
                f"tensor_parallel={size}: {a.name} has {a.num_heads} query heads for "
                f"{a.num_kv_heads} KV heads, and {copies} ranks cannot share the {group} of one: "
                f"use {a.num_heads} or less, and the rest as pipeline_parallel"
            )
        for copy, (q_first, q_last) in enumerate(even_runs(group, copies)):
            at = kv_head * group
            span = (kv_head, kv_head + 1)
            owned = span if copy == 0 else (kv_head, kv_head)
            out.append(((at + q_first, at + q_last), span, owned))
    return out
