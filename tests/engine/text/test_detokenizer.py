from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.text_model import TextModel
from engine.text.tokenizer import Tokenizer, byte_tokenizer

TEXT = "naïve 👩‍👩‍👧‍👦 你好，世界 é한국어 \t\r\n 12345 🇩🇪 ﷽ ا"


class NoEncoder:
    def encode(self, text: str, parse_special: bool) -> list[int]:
        raise AssertionError("only decoding is tested")


def sentencepiece(strip: bool = True) -> Tokenizer:
    words = [b" a", b" ", b"b", "é".encode(), b"</s>"]
    return Tokenizer(
        encoder=NoEncoder(),
        pieces=[bytes([i]) for i in range(256)] + words,
        special_ids=(260,),
        strip_leading_space=strip,
    )


def stream(tokenizer: Tokenizer, groups: list[list[int]], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip)
    return "".join([detokenizer.push(group) for group in groups]) + detokenizer.flush()


id_groups = st.lists(st.lists(st.integers(0, 600), max_size=4), max_size=12)


@settings(deadline=None)
@given(id_groups, st.booleans())
def test_pushes_and_flush_make_the_full_decode_of_random_bytes(groups: list[list[int]], skip: bool):
    ids = [i for group in groups for i in group]
    for tokenizer in (byte_tokenizer(), sentencepiece(), sentencepiece(strip=False)):
        assert stream(tokenizer, groups, skip) == tokenizer.decode(ids, skip)


@settings(deadline=None)
@given(st.lists(st.integers(0, 49_200), max_size=40), st.booleans())
def test_pushes_and_flush_make_the_full_decode_of_random_tokens(
    smollm2: TextModel, ids: list[int], skip: bool
):
    tokenizer = smollm2.tokenizer
    assert stream(tokenizer, [[i] for i in ids], skip) == tokenizer.decode(ids, skip)


# The vocabulary of SmolLM2 lacks some control characters and the lead bytes of empty planes.
spellable = st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc"))


@settings(deadline=None)
@given(st.text(spellable, max_size=30))
def test_text_appears_character_by_character_and_never_broken(smollm2: TextModel, text: str):
    detokenizer = Detokenizer(smollm2.tokenizer)
    shown = ""
    for token_id in smollm2.tokenizer.encode(text, parse_special=False):
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


def test_a_character_comes_with_the_token_that_completes_it():
    detokenizer = Detokenizer(byte_tokenizer())
    assert [detokenizer.push([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]


def test_an_unfinished_character_becomes_one_replacement_at_the_end():
    detokenizer = Detokenizer(byte_tokenizer())
    assert detokenizer.push(list("€".encode()[:2])) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.push([65]) == "A"


def test_special_tokens_are_skipped_even_inside_a_character():
    first, second, third = "€".encode()
    groups = [[first], [257, second], [third]]
    assert stream(byte_tokenizer(), groups, skip=True) == "€"
    assert stream(byte_tokenizer(), groups, skip=False) == "\ufffd<eos>\ufffd\ufffd"


def test_the_first_word_boundary_is_a_space_only_where_the_text_continues():
    tokenizer = sentencepiece()
    assert Detokenizer(tokenizer).push([256, 256]) == "a a"
    assert Detokenizer(tokenizer, continues=True).push([256, 256]) == " a a"


def test_ids_beyond_the_vocabulary_decode_to_nothing(smollm2: TextModel):
    assert Detokenizer(smollm2.tokenizer).push([49_152, 10**9, -1]) == ""
    assert smollm2.tokenizer.decode([49_152, 10**9, -1]) == ""


def test_a_multilingual_text_streams_whole(smollm2: TextModel):
    ids = smollm2.tokenizer.encode(TEXT)
    assert stream(smollm2.tokenizer, [[i] for i in ids], skip=True) == TEXT
