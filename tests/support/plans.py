"""Step plans to feed executors with."""

from dataclasses import replace

from engine.scheduling.plan import Chunk, StepPlan


def random_plan(rng, page, num_blocks, *, decode=False, rows=None, last_block=None):
    """A plan of `rows` chunks (1 to 6 unless told), each of one token with `decode`."""
    blocks = list(range(1, num_blocks))
    rng.shuffle(blocks)
    chunks = []
    for i in range(rows or rng.randint(1, 6)):
        first = rng.choice([0, 1, 15, 16, 40, 250])
        count = 1 if decode or rng.random() < 0.5 else rng.randint(2, 40)
        used = -(-(first + count) // page)
        chunks.append(
            Chunk(
                request_id=f"r{i}",
                first_token=first,
                token_ids=tuple(rng.randrange(250) for _ in range(count)),
                blocks=tuple(blocks.pop() for _ in range(used)),
                sample=decode or rng.random() < 0.7,
            )
        )
    if last_block is not None:
        last = chunks[-1]
        chunks[-1] = replace(last, blocks=(*last.blocks[:-1], last_block))
    return StepPlan(chunks=tuple(chunks))
