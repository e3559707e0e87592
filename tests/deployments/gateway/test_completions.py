from __future__ import annotations

from typing import Any

import pytest

from deployments.link.messages import StreamEvent, TokenLogprob, Usage
from engine.errors import Overloaded
from engine.request import FinishReason

PATH = "/v1/completions"


async def test_the_openai_client_completes_a_text(gateway: Any) -> None:
    async with gateway.client() as client:
        answer = await client.completions.create(model="tiny", prompt="abc")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "the quick brown fox"
    assert answer.usage.prompt_tokens == 3
    assert gateway.backend.request.params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        ([97, 98], [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
async def test_a_prompt_may_be_text_or_ids_one_or_several(
    gateway: Any, prompt: Any, ids: Any
) -> None:
    reply = await gateway.post(PATH, {"model": "tiny", "prompt": prompt})
    assert reply.status == 200
    opened = gateway.backend.opened
    assert sorted(request.prompt_ids for _, request, _, _ in opened) == ids
    assert len({request.request_id for _, request, _, _ in opened}) == len(ids)
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert reply.json()["usage"]["completion_tokens"] == 4 * len(ids)


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(gateway: Any) -> None:
    def script(request: Any, n: int) -> list[Any]:
        usage = Usage(prompt_tokens=1, completion_tokens=n, cached_tokens=1)
        said = bytes(request.prompt_ids).decode()
        return [
            [
                StreamEvent(
                    1,
                    c,
                    f"{said}{c}",
                    [1],
                    finish=FinishReason.STOP,
                    usage=usage if c == n - 1 else None,
                )
            ]
            for c in range(n)
        ]

    gateway.backend.script = script
    body = {"model": "tiny", "prompt": ["x", "y", "z"], "n": 2}
    answer = (await gateway.post(PATH, body)).json()
    texts = [(c["index"], c["text"]) for c in answer["choices"]]
    assert texts == [(0, "x0"), (1, "x1"), (2, "y0"), (3, "y1"), (4, "z0"), (5, "z1")]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3

    events = (await gateway.post(PATH, body | {"stream": True})).events()[:-1]
    streamed = sorted((c["index"], c["text"]) for e in events for c in e["choices"])
    assert streamed == texts


async def test_a_drawn_seed_differs_between_prompts_and_a_sent_one_does_not(gateway: Any) -> None:
    body = {"model": "tiny", "prompt": ["x", "x"]}
    await gateway.post(PATH, body)
    await gateway.post(PATH, body | {"seed": 5})
    seeds = [request.params.seed for _, request, _, _ in gateway.backend.opened]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5]


async def test_the_last_chunk_carries_its_text_with_the_reason(gateway: Any) -> None:
    body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 2}
    *chunks, done = (await gateway.post(PATH, body)).events()
    assert done == "[DONE]"
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "the", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " quick", "logprobs": None, "finish_reason": "length"}],
    ]


async def test_the_openai_client_streams_a_text_with_usage(gateway: Any) -> None:
    async with gateway.client() as client:
        stream = await client.completions.create(
            model="tiny", prompt="a", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "the quick brown fox"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 5


async def test_echo_puts_the_prompt_first_whether_text_or_ids(gateway: Any) -> None:
    body = {"model": "tiny", "echo": True, "max_tokens": 1}
    for prompt in ("say: ", [ord(c) for c in "say: "]):
        whole = await gateway.post(PATH, body | {"prompt": prompt})
        assert whole.json()["choices"][0]["text"] == "say: the"
        streamed = await gateway.post(PATH, body | {"prompt": prompt, "stream": True})
        assert streamed.events()[0]["choices"][0]["text"] == "say: the"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_parallel_lists_with_offsets_of_characters(
    gateway: Any, stream: bool
) -> None:
    def entry(text: bytes, logprob: float) -> TokenLogprob:
        return TokenLogprob(1, text, logprob, ((2, b"z", -3.0),))

    usage = Usage(prompt_tokens=1, completion_tokens=4, cached_tokens=0)
    gateway.backend.script = lambda request, n: [
        [StreamEvent(1, 0, "ab", [1], [entry(b"ab", -0.1)])],
        [StreamEvent(1, 0, "", [1], [entry(b"\xc3", -0.2)])],
        [StreamEvent(1, 0, "é", [1], [entry(b"\xa9", -0.3)])],
        [StreamEvent(1, 0, "c", [1], [entry(b"c", -0.4)], FinishReason.STOP, usage)],
    ]
    body = {"model": "tiny", "prompt": "a", "logprobs": 1, "stream": stream}
    reply = await gateway.post(PATH, body)
    if stream:
        parts = [e["choices"][0]["logprobs"] for e in reply.events()[:-1]]
        told = {key: [x for part in parts for x in part[key]] for key in parts[0]}
    else:
        told = reply.json()["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["ab", "bytes:\\xc3", "bytes:\\xa9", "c"],
        "token_logprobs": [-0.1, -0.2, -0.3, -0.4],
        "top_logprobs": [
            {"z": -3.0, "ab": -0.1},
            {"z": -3.0, "bytes:\\xc3": -0.2},
            {"z": -3.0, "bytes:\\xa9": -0.3},
            {"z": -3.0, "c": -0.4},
        ],
        "text_offset": [0, 2, 2, 3],
    }


async def test_one_prompt_that_fails_ends_the_request_and_closes_all_streams(
    gateway: Any, spell_words: Any
) -> None:
    def script(request: Any, n: int) -> list[Any]:
        if request.prompt_ids == (98,):
            return [Overloaded("no room")]
        return spell_words(request, n)

    gateway.backend.script = script
    reply = await gateway.post(PATH, {"model": "tiny", "prompt": ["a", "b", "c"]})
    assert reply.status == 503
    assert [stream.closed for stream in gateway.backend.streams] == [1, 1, 1]


async def test_a_prompt_waiting_for_its_turn_does_not_hold_up_the_others(gateway: Any) -> None:
    """With one slot, prompts run one after another: the second is admitted when the first ends."""

    def script(request: Any, n: int) -> list[Any]:
        usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
        return [[StreamEvent(1, 0, "x", [1], finish=FinishReason.STOP, usage=usage)]]

    async def one_at_a_time() -> None:
        while any(not stream.closed for stream in gateway.backend.streams):
            gateway.backend.closed.clear()
            await gateway.backend.closed.wait()

    gateway.backend.script = script
    gateway.backend.before_open = one_at_a_time
    reply = await gateway.post(PATH, {"model": "tiny", "prompt": ["a", "b", "c"]})
    assert [c["text"] for c in reply.json()["choices"]] == ["x", "x", "x"]
