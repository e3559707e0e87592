"""Words that a tokenizer takes as one token in any company, and what a chat adds around them.

With such words a text of n of them has n tokens, and two texts that begin with the same words begin
with the same tokens: what replaying prefixes needs and ordinary text does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.errors import ClusterError
from cluster.replay.server import Message, Server

_COMMON = """
    able about above across after again age air all along also always among and another answer any
    area arm art ask away baby back bad ball bank bar base bed before begin behind best better big
    bird bit black blood blue board boat body book born both bottom box boy bread break bring
    brother brown build bus business but buy call came can car card care carry case cat center
    certain chair change child church city class clear close clothes cold color come common cook
    cool corner cost could country course cover cross cut dark day dead deep did different dinner
    doctor dog door down draw dream dress drink drive drop dry each early earth east easy eat edge
    eight else end enough evening ever every example eye face fact fall family far farm fast
    father feel feet few field fight figure fill find fine finger fire first fish five floor
    flower fly food foot force forest form four free friend from front full game garden gave get
    girl give glass go gold good great green ground group grow half hall hand happy hard hat have
    head hear heart heat heavy help here high hill hold home hope horse hot hotel hour house how
    hundred ice idea inside island job join just keep key kind king kitchen knew know lake land
    language large last late laugh law lay lead learn least leave left leg less letter level lie
    life light like line list listen little live long look lost lot love low machine main make man
    many map mark market matter may mean meet men metal middle might mile milk mind minute miss
    money month moon more morning most mother mountain mouth move much music must name near need
    never new next night nine none north nose note nothing now number of off office often oil old
    once one only open order other our outside over own page paint pair paper park part party pass
    past pay people person picture piece place plain plan plane plant play point poor position
    power present press price problem public pull push put question quick quiet quite rain ran
    reach read ready real reason record red rest rich ride right ring rise river road rock room
    round rule run sad safe said sail salt same sand saw say school sea season seat second see
    seem self sell send sent serve set seven several shape sharp ship shop short should show side
    sight sign silver simple since sing sister sit six size skin sky sleep slow small smile snow
    some son song soon sound south space speak special spring square stage stand star start state
    station stay step still stone stood stop store story street strong student study such sugar
    summer sun sure table take talk tall taste teach team tell ten test than thank that the their
    them then there these they thing think third this those thought thousand three through time
    tiny today told tone took top touch toward town track trade train travel tree trip true try
    turn two type under unit until upon use valley very view village visit voice wait walk wall
    want war warm was wash watch water wave way wear weather week weight well went were west wheel
    when where while white whole why wide wife wild will wind window wine winter wish with woman
    wonder wood word work world would write year yellow yes yet young
"""
_MOST_WORDS = 256
"""A word is drawn with one byte."""

_FEWEST_WORDS = 64
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """One-token words of one served model, and the tokens that its chat template adds."""

    words: tuple[str, ...]
    """Each with the space before it, if it has one."""

    ids: tuple[int, ...]
    """Of `words`."""

    chat: ChatFrame | None = None
    """None where it is not known, or the model has no template."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """`head` tokens, the first message, and then for each turn: `tail` tokens, the answer, `join`
    tokens, the next message. The prompt ends with a `tail`."""

    head: int
    tail: int
    join: int


class Tokeniser(Protocol):
    """Served or local."""

    def pieces(self, text: str) -> list[tuple[int, str]] | None: ...

    def chat_ids(self, messages: Sequence[Message]) -> list[int] | None: ...


@dataclass(frozen=True, slots=True)
class ServedTokeniser:
    """The server's own, over its `/tokenize`."""

    server: Server
    model: str

    def pieces(self, text: str) -> list[tuple[int, str]] | None:
        return self.server.pieces(self.model, text)

    def chat_ids(self, messages: Sequence[Message]) -> list[int] | None:
        return self.server.chat_ids(self.model, messages)


class LocalTokeniser:
    """Of a folder with `tokenizer.json`, or of a model source as `args.source` names it."""

    def __init__(self, source: str) -> None:
        """Raises ConfigError."""
        from engine.text.chat_template import ChatTemplate
        from engine.text.text_model import load_text
        from engine.text.tokenizer import tokenizer_from_directory

        path = Path(source).expanduser()
        if path.is_dir():
            self._tokenizer = tokenizer_from_directory(path)
            self._template = ChatTemplate.from_directory(path)
        else:
            text = load_text(source)
            self._tokenizer, self._template = text.tokenizer, text.chat_template

    def pieces(self, text: str) -> list[tuple[int, str]] | None:
        tokenizer = self._tokenizer
        return [
            (token, tokenizer.token_bytes(token).decode("utf-8", "replace"))
            for token in tokenizer.encode(text)
        ]

    def chat_ids(self, messages: Sequence[Message]) -> list[int] | None:
        if self._template is None:
            return None
        return self._tokenizer.encode(self._template.render(messages, add_generation_prompt=True))


def discover(tokeniser: Tokeniser) -> Vocabulary | None:
    """The vocabulary behind `tokeniser`, None where it cannot be asked.

    Raises ClusterError for a tokenizer that has too few one-token words.
    """
    words = _words(tokeniser)
    if words is None:
        return None
    if not words:
        raise ClusterError(
            f"fewer than {_FEWEST_WORDS} common words are one token to this tokenizer, so that no "
            "text of a given length can be made: use --endpoint completions --prompts ids"
        )
    bare = Vocabulary(words=tuple(words), ids=tuple(words.values()))
    return Vocabulary(words=bare.words, ids=bare.ids, chat=_frame(tokeniser, bare))


def _words(tokeniser: Tokeniser) -> dict[str, int] | None:
    common = _COMMON.split()
    pieces = tokeniser.pieces(" " + " ".join(common))
    if pieces is None:
        return None
    wanted = {f" {word}" for word in common}
    words = {text: token for token, text in pieces if text in wanted}
    if len(words) >= _FEWEST_WORDS:
        # Templates strip what is around a message: its first word must be one token without the
        # space too.
        first = {text for _, text in tokeniser.pieces("\n".join(common)) or ()}
        both = {text: token for text, token in words.items() if text[1:] in first}
        chosen = both if len(both) >= _FEWEST_WORDS else words
        return dict(sorted(chosen.items())[:_MOST_WORDS])
    letters = tokeniser.pieces(_LETTERS) or []
    if [text for _, text in letters] == list(_LETTERS):
        twice = tokeniser.pieces(_LETTERS * 2) or []
        if len(twice) == 2 * len(_LETTERS):
            return {text: token for token, text in letters}
    return {}


def _frame(tokeniser: Tokeniser, vocabulary: Vocabulary) -> ChatFrame | None:
    """Measured on messages of known lengths; what differs belongs to the template."""
    words = vocabulary.words
    num = min(8, len(words) // 3)
    texts = ["".join(words[i * num : (i + 1) * num]).lstrip() for i in range(3)]
    one = tokeniser.chat_ids([{"role": "user", "content": texts[0]}])
    other = tokeniser.chat_ids([{"role": "user", "content": texts[1]}])
    more = tokeniser.chat_ids(
        [
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1]},
            {"role": "user", "content": texts[2]},
        ]
    )
    if one is None or other is None or len(one) <= num:
        return None
    head = 0
    while head < len(one) and one[head] == other[head]:
        head += 1
    head = min(head, len(one) - num)
    tail = len(one) - head - num
    join = max(0, len(more) - len(one) - 2 * num - tail) if more else 0
    return ChatFrame(head=head, tail=tail, join=join)
