from __future__ import annotations

from pathlib import Path

import pytest

from cluster.replay.formats import read_trace
from cluster.replay.trace import TraceError

SAMPLES = Path(__file__).parents[2] / "traces"


def lengths(trace) -> list[tuple[float | None, int, int]]:
    return [(r.at_s, r.input_tokens, r.output_tokens) for r in trace.requests]


@pytest.mark.parametrize(
    ("name", "format", "rows", "first"),
    [
        ("azure2023_conv.jsonl", "azure", 300, (0.0, 374, 44)),
        ("azure2023_code.jsonl", "azure", 300, (0.0, 4808, 10)),
        ("mooncake_conversation.jsonl", "mooncake", 299, (0.0, 2290, 316)),
        ("arxiv_summarization_lengths.csv", "lengths", 300, (None, 3772, 54)),
    ],
)
def test_samples_of_public_traces_are_read_by_their_fields(name, format, rows, first):
    trace = read_trace(SAMPLES / name)
    assert (trace.format, len(trace.requests), trace.num_skipped) == (format, rows, 0)
    assert lengths(trace)[0] == first
    assert trace.has_arrivals == (first[0] is not None)


def test_azures_own_csv_is_read_with_seven_digits_of_a_second(tmp_path):
    path = tmp_path / "conv.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2024-05-10 00:00:00.009930+00:00,8,2\n"
    )
    trace = read_trace(path)
    assert trace.format == "azure-csv"
    assert [round(r.at_s, 4) for r in trace.requests[:2]] == [0.0, 4.3146]
    assert trace.requests[2].input_tokens == 8


def test_burstgpt_rows_without_an_answer_are_skipped_and_counted(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s1,ChatGPT,472,18,490,Conversation log\n"
        "45,,GPT-4,1087,0,1087,API log\n"
        "118,s1,ChatGPT,417,276,693,Conversation log\n"
    )
    trace = read_trace(path)
    assert trace.format == "burstgpt"
    assert lengths(trace) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert trace.num_skipped == 1
    assert [r.session for r in trace.requests] == ["s1", "s1"]


def test_servegen_lines_keep_clients_as_tenants_and_come_in_order_of_time(tmp_path):
    path = tmp_path / "gen.jsonl"
    path.write_text(
        '{"timestamp": 12.5, "client_id": 7, "data": {"input_tokens": 3, "output_tokens": 4}}\n'
        "\n"
        '{"timestamp": 10, "client_id": 8, "input_tokens": 5, "output_tokens": 6, "tier": "flex"}\n'
    )
    trace = read_trace(path)
    assert lengths(trace) == [(0.0, 5, 6), (2.5, 3, 4)]
    assert [(r.tenant, r.tier) for r in trace.requests] == [("8", "flex"), ("7", None)]


def mooncake(*stamps: int) -> str:
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 1, "hash_ids": [0, {}]}}\n'
    return "".join(line.format(stamp, i) for i, stamp in enumerate(stamps, 1))


def test_a_mooncake_tick_is_spread_over_its_seconds_but_not_past_the_next(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(mooncake(0, 0, 3000, 3000, 3000, 4500))
    assert [r.at_s for r in read_trace(path).requests] == [0.0, 1.5, 3.0, 3.5, 4.0, 4.5]
    assert [r.at_s for r in read_trace(path, tick_s=0).requests] == [0, 0, 3, 3, 3, 4.5]
    assert read_trace(path).requests[5].chain == (0, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"t": 0, "in": 4, "out": 5}\n{"t": 1, "in": -3, "out": 5}\n', ":2: in=-3: must be a who"),
        ('{"t": 0, "in": 4, "out": 5}\n{"t": 1, "in": 2.5, "out": 5}\n', ":2: in=2.5: must be a"),
        ('{"t": 0, "in": 4, "out": 5}\n{"t": "x", "in": 2, "out": 5}\n', ":2: t='x': must be a nu"),
        ('{"t": 0, "in": 4, "out": 5}\n{"t": 1, "in": 2}\n', ":2: no out: here are t, in"),
        ('{"t": 0, "in": 4, "out": 5}\n{"t": 1,\n', ":2: not JSON"),
        ('{"t": 0, "in": 4, "out": 5}\n[]\n', ":2: '[]': must be an object"),
        ('{"t": 0, "in": 0, "out": 5}\n', ": no request in it (1 rows)"),
        ('{"a": 0}\n', ":1: fields a are of no format known here"),
        ("", ":1: fields (none) are of no format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", ":2: 2 fields, but the header has 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,2,3\n", ":2: TIMESTAMP='now': must be like"),
        (
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n',
            ":1: 2 hash_ids, but input_length=512 has 1 blocks of 512 tokens",
        ),
        (
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": ["a"]}\n',
            ":1: hash_ids=['a']: must be a list of whole numbers",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_value(tmp_path, text, message):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert f"{path}{message}" in str(refused.value)


def test_a_file_that_is_not_there_and_a_format_that_nobody_knows(tmp_path):
    with pytest.raises(TraceError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match=r"format 'x': there are request-log, mooncake"):
        read_trace(SAMPLES / "azure2023_conv.jsonl", format="x")


def test_a_trace_in_a_row_shares_nothing_across_repetitions(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(mooncake(0, 3000, 6000))
    trace = read_trace(path).repeated(2)
    assert [r.at_s for r in trace.requests] == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    assert [r.chain for r in trace.requests[::3]] == [(0, 1), ("1/0", "1/1")]
    lengths = read_trace(SAMPLES / "arxiv_summarization_lengths.csv").repeated(2)
    assert [len(lengths.requests), lengths.requests[300].at_s] == [600, None]
    assert lengths.requests[300].input_tokens == lengths.requests[0].input_tokens
