from __future__ import annotations

from cluster.replay.prefixes import InfiniteCache, Segment


def prompt(*pairs):
    return [Segment(key, tokens) for key, tokens in pairs]


def test_a_prompt_hits_what_it_shares_with_the_beginning_of_any_before_it():
    cache = InfiniteCache()
    assert cache.offer(prompt(("a", 64), ("b", 64), ("own", 10))) == 0
    assert cache.offer(prompt(("a", 64), ("b", 64), ("other", 10))) == 128
    assert cache.offer(prompt(("b", 64), ("a", 64))) == 0  # not at the beginning
    assert cache.offer(prompt(("a", 64), ("c", 64))) == 64


def test_the_last_token_is_always_computed():
    cache = InfiniteCache()
    same = prompt(("a", 64), ("b", 6))
    assert (cache.offer(same), cache.offer(same)) == (0, 69)


def test_a_part_of_a_block_hits_as_far_as_it_goes_and_ends_there():
    cache = InfiniteCache()
    cache.offer(prompt(("a", 64), ("b", 20), ("tail", 6)))
    assert cache.offer(prompt(("a", 64), ("b", 64), ("c", 64))) == 84
    assert cache.offer(prompt(("a", 64), ("b", 30), ("c", 64))) == 94
    assert cache.offer(prompt(("a", 64), ("b", 20), ("tail", 6), ("more", 1))) == 90


def test_hits_are_whole_blocks_of_the_server():
    cache = InfiniteCache(block_tokens=16)
    cache.offer(prompt(("a", 40)))
    assert cache.offer(prompt(("a", 40), ("b", 9))) == 32
