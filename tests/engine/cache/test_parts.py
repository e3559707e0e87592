"""Prompts that share part of a block: what is found, copied, held and given back."""

from dataclasses import replace

import pytest

from engine.build import assemble
from engine.cache import BlockCopy, BlockManager
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.models.load import load_model
from engine.request import Request, SamplingParams
from engine.text.text_model import load_text

PROMPT = tuple(range(100, 120))


def make_manager(num_blocks=9, block_tokens=8, reuse_tokens=2, **changes):
    config = CacheConfig(
        num_blocks=num_blocks, block_tokens=block_tokens, reuse_tokens=reuse_tokens, **changes
    )
    return BlockManager(config, "weights")


def computed(manager, request_id, tokens, salt="", count=None):
    """A request whose KV is there."""
    assert manager.allocate(request_id, tokens, salt, len(tokens)) is not None
    manager.take_copies()
    manager.settle_copies(made=True)
    manager.commit(request_id, tokens, len(tokens) if count is None else count)
    return manager.table(request_id)


def test_the_longest_common_part_of_a_block_is_copied():
    manager = make_manager()
    theirs = computed(manager, "a", PROMPT)
    # 8 tokens whole, 5 more agree: two parts of 2.
    other = (*PROMPT[:13], 7, 7, 7, 7)
    assert manager.allocate("b", other, "", len(other)) == 12
    mine = manager.table("b")
    assert mine[0] == theirs[0]
    assert mine[1] not in theirs
    assert manager.take_copies() == (BlockCopy(theirs[1], mine[1], 4),)
    manager.settle_copies(made=True)
    assert manager.take_copies() == ()
    manager.check()


def test_a_table_that_ends_before_the_part_takes_none():
    manager = make_manager()
    computed(manager, "a", PROMPT)
    assert manager.allocate("b", PROMPT, "", 8) == 16
    assert manager.take_copies() == ()
    assert len(manager.table("b")) == 2
    manager.check()


def test_a_block_that_is_not_full_is_found_too():
    manager = make_manager()
    theirs = computed(manager, "a", PROMPT[:5])
    manager.free("a")
    manager.check()
    assert manager.allocate("b", PROMPT, "", 20) == 4
    assert manager.take_copies()[0].source == theirs[0]


def test_one_token_is_always_left_to_compute():
    manager = make_manager()
    computed(manager, "a", PROMPT)
    assert manager.allocate("b", PROMPT[:8], "", 8) == 6
    assert manager.allocate("c", PROMPT[:7], "", 7) == 6
    assert manager.allocate("d", PROMPT[:6], "", 6) == 4


def test_uncomputed_tokens_and_other_tenants_tokens_are_not_found():
    manager = make_manager()
    computed(manager, "a", PROMPT[:8], count=3)
    assert manager.allocate("b", PROMPT[:8], "tenant", 8) == 0
    assert manager.allocate("c", PROMPT[:8], "", 8) == 2
    manager.check()


def test_without_copies_whole_blocks_count_alone():
    manager = make_manager()
    computed(manager, "a", PROMPT)
    assert manager.allocate("b", PROMPT, "", 20, copies=False) == 16
    assert manager.take_copies() == ()


def test_source_and_target_are_held_until_the_copy_is_made():
    manager = make_manager(num_blocks=4, block_tokens=8)
    source = computed(manager, "a", PROMPT[:8])[0]
    manager.free("a")
    assert manager.allocate("b", (*PROMPT[:6], 1, 2), "", 8) == 6
    (copy,) = manager.take_copies()
    manager.free("b")  # cancelled while the copy is being made
    assert manager.num_held_blocks == 2
    # One block is left: neither of the two is handed out.
    assert manager.allocate("c", (5, 5, 5), "", 8) == 0
    assert manager.table("c")[0] not in (source, copy.target)
    assert manager.allocate("d", (6, 6, 6), "", 8) is None
    manager.settle_copies(made=True)
    assert manager.num_held_blocks == 1
    manager.check()


def test_a_copy_that_nobody_wants_any_more_is_dropped_before_it_is_made():
    manager = make_manager()
    computed(manager, "a", PROMPT[:8])
    manager.allocate("b", (*PROMPT[:6], 1, 2), "", 8)
    manager.free("b")
    assert manager.take_copies() == ()
    manager.free("a")
    assert manager.num_held_blocks == 0
    manager.check()


def test_copies_of_a_pass_that_failed_are_taken_again():
    manager = make_manager()
    computed(manager, "a", PROMPT[:8])
    manager.allocate("b", (*PROMPT[:6], 1, 2), "", 8)
    taken = manager.take_copies()
    manager.settle_copies(made=False)
    assert manager.take_copies() == taken
    manager.free("b")
    manager.settle_copies(made=False)
    assert manager.take_copies() == ()
    manager.check()


@pytest.mark.parametrize("taken", [False, True])
def test_copies_of_those_who_give_up_count_until_they_are_being_made(taken):
    manager = make_manager(num_blocks=4)
    computed(manager, "a", PROMPT[:8])
    manager.free("a")
    manager.allocate("b", (*PROMPT[:6], 1, 2), "", 8)  # holds its own block and the source
    if taken:
        manager.take_copies()
    other = tuple(range(24))
    fits = manager.fits(other, "", 24, freeing=["b"])
    manager.free("b")
    assert fits is not taken
    assert (manager.allocate("c", other, "", 24) is not None) is fits
    manager.check()


def test_a_prompt_gets_its_blocks_where_the_source_would_take_the_last_one():
    manager = make_manager(num_blocks=3, block_tokens=8)
    computed(manager, "a", PROMPT[:8])
    manager.free("a")
    # Two blocks are free, one of them the source: both are needed.
    assert manager.allocate("b", (*PROMPT[:6], *range(10)), "", 16) == 0
    assert manager.take_copies() == ()
    manager.check()


def test_a_reset_forgets_parts():
    manager = make_manager()
    computed(manager, "a", PROMPT)
    manager.reset()
    assert manager.allocate("b", PROMPT, "", 20) == 0
    manager.check()


def test_parts_must_divide_a_block():
    with pytest.raises(ConfigError, match="reuse_tokens=3: must divide block_tokens=8"):
        make_manager(reuse_tokens=3)


# Through the engine


@pytest.fixture(scope="module", params=["fake", "tiny"])
def model(request):
    config = ModelConfig(name=request.param, source=request.param)
    return load_model(config), load_text(request.param).tokenizer


def build(model, reuse_tokens, **limits):
    weights, tokenizer = model
    config = EngineConfig(
        model=ModelConfig(name="m", source="m"),
        max_context_tokens=1024,
        block_tokens=256,
        num_blocks=12,
        reuse_tokens=reuse_tokens,
        scheduler=SchedulerConfig(**limits),
    )
    return assemble(config, weights, tokenizer)


def answers(built, requests):
    for request in requests:
        built.engine.submit(request)
    tokens = {request.request_id: [] for request in requests}
    cached = {}
    while (step := built.engine.step()) is not None:
        built.engine.check()
        for output in step.outputs:
            tokens[output.request_id].append(output.token.token_id)
            cached[output.request_id] = output.num_cached_tokens
    assert built.engine.stats().num_held_blocks == 0
    return tokens, cached


def conversation():
    """Turns of two talks with one system prompt of 70 tokens, each longer than the last."""
    system = tuple(32 + i % 90 for i in range(70))
    for turn in range(5):
        for talk in range(2):
            said = tuple(32 + (13 * talk + 7 * i) % 90 for i in range(75 * (turn + 1)))
            yield Request(
                request_id=f"{talk}-{turn}",
                prompt_ids=system + said,
                params=SamplingParams(max_tokens=6, temperature=1.0, seed=10 * turn + talk),
            )


def test_copied_parts_change_no_token(model):
    want, found = {}, {}
    for request in conversation():
        tokens, _ = answers(build(model, 256), [request])
        want.update(tokens)
    # Chunks of 7 stop in the middle of parts; two talks at once copy from each other.
    built = build(model, 32, max_chunk_tokens=7, max_step_tokens=16)
    turns = list(conversation())
    got = {}
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        tokens, cached = answers(built, [first, second])
        got.update(tokens)
        found.update(cached)
    assert got == want
    assert found["0-0"] == 0
    assert found["0-1"] == 128  # 145 tokens were there, blocks of 256 whole: none
    assert found["0-4"] == 352  # 370: one block whole and three parts


def test_large_blocks_are_reused_in_parts_unless_told_otherwise(model):
    turns = list(conversation())
    built = build(model, None)
    answers(built, turns[:1])
    _, cached = answers(built, [replace(turns[1], request_id="again")])
    assert cached["again"] == 64


def test_a_request_whose_kv_arrives_shares_whole_blocks_only(model):
    """Nothing computes before its KV is used, so nobody would make the copy."""
    turns = list(conversation())
    built = build(model, 32)
    answers(built, turns[:1])
    reservation = built.engine.submit(turns[2], remote=True)
    assert reservation is not None
    assert reservation.num_cached_tokens == 0
    assert built.engine.blocks.take_copies() == ()
    built.engine.cancel(turns[2].request_id)
    assert built.engine.stats().num_held_blocks == 0
