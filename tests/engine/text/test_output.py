from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.text.output import TextStream
from engine.text.tokenizer import byte_tokenizer


def make_stream(**params: object) -> TextStream:
    return TextStream(byte_tokenizer(), SamplingParams(max_tokens=100, **params))  # type: ignore[arg-type]


def feed(stream: TextStream, text: str, *, finish: bool = True) -> list[tuple[str, bool]]:
    data = text.encode()
    return [stream.push([byte], finish and i == len(data) - 1) for i, byte in enumerate(data)]


def test_text_up_to_the_stop_string_is_shown():
    assert feed(make_stream(stop=("##",)), "ab##", finish=False) == [
        ("a", False),
        ("b", False),
        ("", False),
        ("", True),
    ]


def test_what_was_held_back_is_shown_when_the_request_finishes():
    assert feed(make_stream(stop=("##",)), "a#") == [("a", False), ("#", False)]


def test_half_a_character_at_the_end_is_one_replacement():
    stream = make_stream()
    assert stream.push([0xE2, 0x82], True) == ("\N{REPLACEMENT CHARACTER}", False)


def test_the_eos_token_is_not_shown():
    assert make_stream().push([65, 257], True) == ("A", False)


def test_a_stop_token_that_ends_the_request_is_not_shown():
    assert make_stream(stop_token_ids=(66,)).push([65, 66], True) == ("A", False)
    assert make_stream(stop_token_ids=(66,)).push([66, 65], False) == ("BA", False)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens():
    stream = make_stream(stop=("a",), min_tokens=2)
    assert feed(stream, "aaxa", finish=False) == [
        ("a", False),
        ("a", False),
        ("x", False),
        ("", True),
    ]


def test_a_stop_string_in_the_flushed_text_counts():
    stream = make_stream(stop=("\ufffd",))
    assert stream.push([65, 0xE2], True) == ("A", True)


@pytest.mark.parametrize("split", range(7))
def test_another_replica_continues_at_the_same_character(split: int):
    data = list("a€#b##c".encode())
    first, second = make_stream(stop=("##",)), make_stream(stop=("##",))
    shown = "".join(first.push([i], False)[0] for i in data[:split])
    assert second.push(data[:split], False)[0] == shown
    rest = data[split:]
    assert [first.push([i], False) for i in rest] == [second.push([i], False) for i in rest]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(90, 99), max_size=3), max_size=8))
def test_shown_text_does_not_depend_on_how_tokens_are_grouped(groups: list[list[int]]):
    grouped, single = make_stream(stop=("ab", "bcd")), make_stream(stop=("ab", "bcd"))
    a = "".join(grouped.push(group, False)[0] for group in groups)
    b = "".join(single.push([i], False)[0] for group in groups for i in group)
    assert a == b
    assert grouped.push([], True) == single.push([], True)
