"""Cutting a step into micro-batches, so that the stages of a pipeline compute at the same time
where no other step keeps them busy.

```
stage 0   m0 m1 m2 m3
stage 1      m0 m1 m2 m3
```

A pure function of the plan: every rank cuts it in the same places.
"""

from __future__ import annotations

from dataclasses import replace

from engine.scheduling.plan import Chunk, StepPlan

MIN_PROMPT_TOKENS = 32
"""A chunk of a prompt is cut into pieces no shorter than this: each piece reads all weights."""


def micro_batches(plan: StepPlan, num_stages: int) -> list[tuple[Chunk, ...]]:
    """The plan's chunks in order, in runs of about equally many tokens, none of them empty.

    Two runs a stage where prompts give enough tokens for that (a bubble of `stages - 1` runs is
    then a third of a step or less), else one a stage. A prompt's chunk may be cut: its later piece
    reads the KV that the earlier one has stored, as in chunked prefill. Only the last piece keeps
    `sample`.
    """
    total = plan.num_tokens
    if num_stages == 1 or total == 1:
        return [plan.chunks]
    wanted = 2 * num_stages if total >= 2 * num_stages * MIN_PROMPT_TOKENS else num_stages
    target = -(-total // wanted)
    runs: list[tuple[Chunk, ...]] = []
    run: list[Chunk] = []
    room = target
    for chunk in plan.chunks:
        rest: Chunk | None = chunk
        while rest is not None:
            size = len(rest.token_ids)
            if size <= room or min(room, size - room) < MIN_PROMPT_TOKENS:
                piece, rest = rest, None
            else:
                piece, rest = _cut(rest, room)
            run.append(piece)
            room -= len(piece.token_ids)
            if room <= 0:
                runs.append(tuple(run))
                run, room = [], target
    if run:
        runs.append(tuple(run))
    return runs


def _cut(chunk: Chunk, at: int) -> tuple[Chunk, Chunk]:
    left = replace(chunk, token_ids=chunk.token_ids[:at], sample=False)
    right = replace(chunk, first_token=chunk.first_token + at, token_ids=chunk.token_ids[at:])
    return left, right
