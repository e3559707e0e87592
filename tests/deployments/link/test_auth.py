from __future__ import annotations

from typing import Any

import pytest

from deployments.link.auth import Handshake, Peer
from deployments.link.messages import PROTOCOL_VERSION, Kind
from deployments.link.wire import CloseCode, WireError
from engine.errors import ConfigError

SECRET = b"the secret of the test cluster!!"


def client(secret: bytes = SECRET) -> Handshake:
    return Handshake(secret, "gateway", "gateway-1", client=True)


def server(secret: bytes = SECRET) -> Handshake:
    return Handshake(secret, "decode", "decode-1", client=False)


def converse(a: Handshake, b: Handshake) -> list[list[Any]]:
    """Carry messages between both until none is left; all that crossed, in order."""
    crossed: list[list[Any]] = []
    pending = [(b, message) for message in a.opening()]
    while pending:
        to, message = pending.pop(0)
        crossed.append(message)
        other = a if to is b else b
        pending += [(other, answer) for answer in to.answer(message)]
    return crossed


def test_both_sides_learn_who_the_other_is() -> None:
    a, b = client(), server()
    crossed = converse(a, b)
    assert a.peer == Peer("decode", "decode-1")
    assert b.peer == Peer("gateway", "gateway-1")
    assert [message[0] for message in crossed] == [Kind.HELLO, Kind.HELLO, Kind.PROOF, Kind.PROOF]


def test_the_server_refuses_a_client_with_another_secret_before_proving_itself() -> None:
    a, b = client(b"another secret, also 32 bytes!!!"), server()
    with pytest.raises(WireError) as caught:
        converse(a, b)
    assert caught.value.code is CloseCode.WRONG_SECRET
    assert (a.peer, b.peer) == (None, None)
    assert "secret of" not in str(caught.value)


def test_a_server_that_cannot_prove_itself_is_refused() -> None:
    a = client()
    [_] = a.opening()
    a.answer(server().answer(client().opening()[0])[0])
    with pytest.raises(WireError) as caught:
        a.answer([Kind.PROOF, b"\0" * 32])
    assert caught.value.code is CloseCode.WRONG_SECRET


def test_a_proof_of_one_handshake_is_worth_nothing_in_another() -> None:
    a, b = client(), server()
    hello, _, proof, _ = converse(a, b)
    replayed = server()
    replayed.answer(hello)
    with pytest.raises(WireError) as caught:
        replayed.answer(proof)
    assert caught.value.code is CloseCode.WRONG_SECRET


def test_a_proof_cannot_be_reflected_to_its_sender() -> None:
    a = client()
    [hello] = a.opening()
    [proof] = a.answer(hello)
    with pytest.raises(WireError) as caught:
        a.answer(proof)
    assert caught.value.code is CloseCode.WRONG_SECRET


@pytest.mark.parametrize("item", [2, 3])
def test_a_changed_role_or_id_breaks_the_proof(item: int) -> None:
    a, b = client(), server()
    [hello] = a.opening()
    hello[item] = "prefill"
    [answer] = b.answer(hello)
    [proof] = a.answer(answer)
    with pytest.raises(WireError) as caught:
        b.answer(proof)
    assert caught.value.code is CloseCode.WRONG_SECRET


def test_another_protocol_version_is_named_whatever_else_it_sends() -> None:
    with pytest.raises(WireError) as caught:
        server().answer([Kind.HELLO, PROTOCOL_VERSION + 1])
    assert caught.value.code is CloseCode.WRONG_VERSION
    assert f"version {PROTOCOL_VERSION + 1}, this side {PROTOCOL_VERSION}" in str(caught.value)


def test_a_refusal_is_taken_over_by_the_client() -> None:
    with pytest.raises(WireError) as caught:
        client().answer([Kind.BYE, CloseCode.WRONG_VERSION.value, "the peer speaks version 1"])
    assert caught.value.code is CloseCode.WRONG_VERSION


@pytest.mark.parametrize(
    "message",
    [
        [Kind.PROOF, b"\0" * 32],
        [Kind.SUBMIT, 1],
        [Kind.HELLO],
        [Kind.HELLO, "1"],
        [Kind.HELLO, PROTOCOL_VERSION, "gateway", "g"],
        [Kind.HELLO, PROTOCOL_VERSION, "gateway", "", b"\0" * 32],
        [Kind.HELLO, PROTOCOL_VERSION, "gateway", "g" * 201, b"\0" * 32],
        [Kind.HELLO, PROTOCOL_VERSION, "gateway", "g", b"\0" * 8],
        [Kind.HELLO, PROTOCOL_VERSION, 7, "g", b"\0" * 32],
    ],
    ids=str,
)
def test_a_first_message_that_is_no_hello_is_malformed(message: list[Any]) -> None:
    with pytest.raises(WireError) as caught:
        server().answer(message)
    assert caught.value.code is CloseCode.MALFORMED


def test_a_secret_too_short_to_protect_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 5 bytes: 16 or more"):
        client(b"short")
