"""Text to token ids and back.

Decoding is done here, from a table of each token's own bytes, rather than by the `tokenizers`
library: then one token at a time and all at once are the same text by construction
(`detokenizer.py`), and a token's bytes, which the API reports beside its log-probability, are the
bytes that were sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from engine.errors import ConfigError, RequestError
from engine.text.gguf_header import GGUFHeader
from engine.text.json_file import as_list, as_object, read_json

BYTE_VOCAB_SIZE = 512
BYTE_BOS_ID = 256
BYTE_EOS_ID = 257

_CONTROL, _USER_DEFINED, _UNKNOWN, _UNUSED = 3, 4, 2, 5
"""`tokenizer.ggml.token_type` values that are more than plain text (llama.h, llama_token_type)."""

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|endoftext|>",
    "<EOT>",
)
"""Control tokens that end a generation whatever the metadata says: GGUF names one eos, and chat
models may end a turn with another (llama.cpp keeps such a list too)."""

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")

_PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": _DEFAULT_SPLITS,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "gigachat"), (_GPT2_SPLIT,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2_SPLIT),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"),
        (_LLAMA3_SPLIT,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2_SPLIT,)),
    "tekken": (_TEKKEN_SPLIT,),
}
"""`tokenizer.ggml.pre` to the expressions that split text before merging, each applied to the
pieces that the one before it left (llama.cpp, llama-vocab.cpp)."""

_WHOLE_WORDS_FIRST = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"))
"""Pre-tokenizers whose vocabulary holds words that their merges do not reach; these also add a BOS
unless the metadata says otherwise."""


def _byte_alphabet() -> dict[int, int]:
    """Code point of the character that byte-level BPE writes for a byte, to that byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_BOUNDARY = "▁"


class Encoder(Protocol):
    """Turns text into ids, without tokens that the text does not spell."""

    def encode(self, text: str, parse_special: bool) -> list[int]: ...


class Tokenizer:
    """Encodes text, and decodes ids from the bytes each one stands for.

    Ids at or beyond `vocab_size` (models pad their vocabulary) decode to nothing.
    """

    def __init__(
        self,
        *,
        encoder: Encoder,
        pieces: list[bytes],
        special_ids: Iterable[int] = (),
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        strip_leading_space: bool = False,
    ) -> None:
        """`pieces[i]` are the bytes of token i; `prefix_ids` and `suffix_ids` what
        `add_special_tokens` puts around a text; `strip_leading_space` is set where a text's first
        word boundary is written by the tokenizer (sentencepiece)."""
        self._encoder = encoder
        self._pieces = pieces
        self._prefix = list(prefix_ids)
        self._suffix = list(suffix_ids)
        self.strip_leading_space = strip_leading_space
        self.vocab_size = len(pieces)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        bos = () if bos_token_id is None else (bos_token_id,)
        self.special_ids = frozenset((*special_ids, *self.eos_token_ids, *bos))

    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Special tokens that the text spells (`<|im_start|>`: the chat template writes them) become
        their ids. With `parse_special=False` they are plain text, for text that nobody vouches for.
        (The first such call builds a second instance of the tokenizer, a tenth of a second.)
        `add_special_tokens` adds what the model expects around a bare text, usually a BOS, unless
        it is there already. Raises RequestError for text that is not Unicode (half a surrogate
        pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at "
                f"character {error.start}: send Unicode text"
            ) from error
        ids = self._encoder.encode(text, parse_special)
        if add_special_tokens:
            if ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if self._suffix and ids[-len(self._suffix) :] != self._suffix:
                ids = ids + self._suffix
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        size, pieces = self.vocab_size, self.pieces(skip_special_tokens)
        text = b"".join([pieces[i] for i in ids if 0 <= i < size]).decode("utf-8", "replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, maybe part of a character; the spelling of a special token."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def fewest_tokens(self, text: str) -> int:
        """At least how many tokens `text` takes, without encoding it.

        For refusing a text that cannot fit before seconds are spent on it: encoding takes some
        microseconds a token. (It may come out lower where the tokenizer drops characters that its
        vocabulary cannot spell, or composes them.)
        """
        return -(-len(text) // self._longest_text)

    @cached_property
    def _longest_text(self) -> int:
        # In bytes, of which a character has at least one.
        return max((len(piece) for piece in self._pieces), default=0) or 1

    def pieces(self, skip_special_tokens: bool) -> list[bytes]:
        """Bytes of every token, those of special tokens empty if they are skipped. Not a copy."""
        return self._visible_pieces if skip_special_tokens else self._pieces

    def texts(self, skip_special_tokens: bool) -> list[str | None]:
        """Text of every token, None for those that are not whole characters. Not a copy."""
        return self._visible_texts if skip_special_tokens else self._texts

    @cached_property
    def _visible_pieces(self) -> list[bytes]:
        pieces = list(self._pieces)
        for token_id in self.special_ids:
            if token_id < len(pieces):
                pieces[token_id] = b""
        return pieces

    @cached_property
    def _texts(self) -> list[str | None]:
        return [_whole_text(piece) for piece in self._pieces]

    @cached_property
    def _visible_texts(self) -> list[str | None]:
        texts = list(self._texts)
        for token_id in self.special_ids:
            if token_id < len(texts):
                texts[token_id] = ""
        return texts


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class _ByteEncoder:
    def encode(self, text: str, parse_special: bool) -> list[int]:
        return list(text.encode())


class _LibraryEncoder:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._plain
        return tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # A second instance, because the library's switch is a property of the whole tokenizer and
        # other threads may be encoding with it.
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 BOS, 257 EOS, and up to 512 nothing: for the built-in models."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"<bos>", b"<eos>"]
    pieces += [b""] * (BYTE_VOCAB_SIZE - len(pieces))
    return Tokenizer(
        encoder=_ByteEncoder(),
        pieces=pieces,
        eos_token_ids=(BYTE_EOS_ID,),
        bos_token_id=BYTE_BOS_ID,
    )


def eos_ids_from_gguf(header: GGUFHeader) -> tuple[int, ...]:
    """Every token that ends a generation: the metadata's own, then known end-of-turn tokens."""
    tokens: list[str] = header.require("tokenizer.ggml.tokens", list)
    types: list[int] = header.get("tokenizer.ggml.token_type", list, [])
    named = [header.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if token_id is not None and token_id < len(tokens)]
    positions = {tokens[i]: i for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL}
    ids += [positions[text] for text in _END_OF_TURN if text in positions]
    return tuple(dict.fromkeys(ids))


def tokenizer_from_gguf(header: GGUFHeader) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes (`tokenizer.ggml.model` = `gpt2`).

    Raises ConfigError for another kind, an unknown pre-tokenizer or a vocabulary that contradicts
    itself.
    """
    path = header.path
    kind = header.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ConfigError(
            f"{path}: tokenizer model {kind!r} is not supported in GGUF, only 'gpt2' (byte-level "
            "BPE): use the model's safetensors directory with its tokenizer.json"
        )
    pre = header.get("tokenizer.ggml.pre", str, "default")
    splits = _PRE_TOKENIZERS.get(pre)
    if splits is None:
        raise ConfigError(
            f"{path}: pre-tokenizer {pre!r} is none of {', '.join(sorted(_PRE_TOKENIZERS))}: "
            "use the model's safetensors directory with its tokenizer.json"
        )
    tokens: list[str] = header.require("tokenizer.ggml.tokens", list)
    merges: list[str] = header.require("tokenizer.ggml.merges", list)
    types: list[int] = header.get("tokenizer.ggml.token_type", list, [])
    if types and len(types) != len(tokens):
        raise ConfigError(
            f"{path}: {len(tokens)} tokens but {len(types)} token types: the file contradicts "
            "itself, convert the model again"
        )
    bos_token_id: int | None = header.get("tokenizer.ggml.bos_token_id", int)
    eos_token_ids = eos_ids_from_gguf(header)
    control = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    specials = control | set(eos_token_ids)
    user_defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - specials
    unused = {i for i, kind in enumerate(types) if kind == _UNUSED} - specials

    model = _bpe(path, tokens, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library: Any = tokenizer  # its stubs leave these two methods untyped
    library.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(specials)]
    )
    library.add_tokens(
        [AddedToken(tokens[i], special=False, normalized=False) for i in sorted(user_defined)]
    )
    pieces = _byte_level_pieces(tokens, raw=specials | user_defined)
    for token_id in unused:
        pieces[token_id] = b""
    add_bos: bool = header.get("tokenizer.ggml.add_bos_token", bool, pre in _WHOLE_WORDS_FIRST)
    add_eos: bool = header.get("tokenizer.ggml.add_eos_token", bool, False)
    return Tokenizer(
        encoder=_LibraryEncoder(tokenizer),
        pieces=pieces,
        special_ids=specials,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        prefix_ids=[bos_token_id] if add_bos and bos_token_id is not None else [],
        suffix_ids=eos_token_ids[:1] if add_eos else [],
    )


def _bpe(path: Path, tokens: list[str], merges: list[str], ignore_merges: bool) -> models.BPE:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        # A piece may itself begin with a space, so the separator is looked for from index 1.
        middle = merge.find(" ", 1)
        if middle < 0:
            raise ConfigError(f"{path}: merge {merge!r} is not two pieces: convert the model again")
        pairs.append((merge[:middle], merge[middle + 1 :]))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: vocabulary and merges do not fit: {error}") from error


def _byte_level_pieces(tokens: Sequence[str], raw: Iterable[int]) -> list[bytes]:
    """Bytes of each token; those in `raw` are spelled as they are, not in the byte alphabet."""
    pieces: list[bytes] = []
    for token in tokens:
        try:
            pieces.append(token.translate(_ALPHABET_TO_LATIN1).encode("latin-1"))
        except UnicodeEncodeError:
            pieces.append(token.encode())
    for token_id in raw:
        pieces[token_id] = tokens[token_id].encode()
    return pieces


# Characters outside the alphabet but inside latin-1 (a space, say) must not pass for bytes.
_ALPHABET_TO_LATIN1 = {
    **{code: chr(0xE000 + code) for code in range(256) if code not in _ALPHABET},
    **{code: chr(byte) for code, byte in _ALPHABET.items()},
}


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Load `tokenizer.json`, with the EOS and BOS that the other files of the directory name.

    Raises ConfigError for a file that cannot be read or a decoder that is not byte-level BPE or
    sentencepiece-like.
    """
    file = path / "tokenizer.json"
    description = read_json(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file}: not a tokenizer of the tokenizers library: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    pieces, strip = _pieces_by_decoder(file, description.get("decoder"), tokens, added)
    config = read_json(path / "tokenizer_config.json", missing={})
    eos = eos_ids_from_directory(path)
    eos_text, bos_text = (special_token_text(config, name) for name in ("eos_token", "bos_token"))
    if eos_text in vocab:
        eos = (*eos, vocab[eos_text])
    prefix, suffix = _around(tokenizer)
    return Tokenizer(
        encoder=_LibraryEncoder(tokenizer),
        pieces=pieces,
        special_ids=[token_id for token_id, token in added.items() if token.special],
        eos_token_ids=eos,
        bos_token_id=vocab.get(bos_text) if bos_text else None,
        prefix_ids=prefix,
        suffix_ids=suffix,
        strip_leading_space=strip,
    )


def eos_ids_from_directory(path: Path) -> tuple[int, ...]:
    """`eos_token_id` (a number or a list) of generation_config.json, then of config.json."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name, missing={}).get("eos_token_id")
        for item in as_list(value) if isinstance(value, list) else [value]:
            if isinstance(item, int):
                ids.append(item)
            elif item is not None:
                raise ConfigError(f"{path / name}: eos_token_id={value!r}: must be numbers")
    return tuple(dict.fromkeys(ids))


def special_token_text(config: Mapping[str, Any], name: str) -> str | None:
    """`bos_token` and kin of tokenizer_config.json: a string, or an object with `content`."""
    value = config.get(name)
    text = as_object(value).get("content", value)
    return text if isinstance(text, str) else None


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    outer = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(outer) - len(inner) + 1):
        if outer[start : start + len(inner)] == inner:
            return outer[:start], outer[start + len(inner) :]
    return [], []


def _pieces_by_decoder(
    file: Path, decoder: Any, tokens: list[str], added: Mapping[int, AddedToken]
) -> tuple[list[bytes], bool]:
    """Bytes of each token, and whether a text's leading space belongs to the tokenizer."""
    outer = as_object(decoder)
    nested = as_list(outer.get("decoders")) if outer.get("type") == "Sequence" else [outer]
    steps = [as_object(step) for step in nested]
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_pieces(tokens, raw=added), False
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strip = any(
            (step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        pieces = [_sentencepiece_piece(token, "ByteFallback" in kinds) for token in tokens]
        for token_id in added:
            pieces[token_id] = tokens[token_id].encode()
        return pieces, strip
    raise ConfigError(
        f"{file}: decoder {decoder and kinds} is not supported: byte-level BPE (ByteLevel) and "
        "sentencepiece (Metaspace, or Replace, ByteFallback, Fuse, Strip) are"
    )


def _sentencepiece_piece(token: str, byte_fallback: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_BOUNDARY, " ").encode()
