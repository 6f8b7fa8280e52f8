"""Workloads from files: traces, records, conversations and prompts; what is wrong with one is said with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.made_tokenizers import byte_level, metaspace

from twinpool.bench.serving.datasets import (
    DatasetName,
    DatasetSettings,
    PromptAs,
    TooLong,
    TraceSettings,
    Workload,
    make_workload,
)
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount, encode_run
from twinpool.bench.serving.workload import Chat
from twinpool.errors import ConfigError


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Writes a file and makes the workload of it."""

    def make(name: DatasetName, content: str | bytes, num_prompts: int = 0, **settings: Any) -> Workload:
        path = tmp_path / "data"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        tokenizer = settings.pop("tokenizer", byte_level())
        return make_workload(DatasetSettings(name, str(path), **settings), tokenizer, num_prompts, 1)

    return make


def _lines(*values: object) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


def _traced(at_ms: float, inputs: int, outputs: int, *hash_ids: int) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": inputs, "output_length": outputs, "hash_ids": list(hash_ids)}


def test_a_jsonl_trace_has_its_times_lengths_and_shared_blocks(made: Any) -> None:
    trace = _lines(_traced(500, 20, 3, 0, 1, 2), _traced(1500, 16, 4, 0, 1), _traced(1750, 21, 5, 0, 9, 4))
    first, second, third = made(
        DatasetName.JSONL_TRACE, trace, prompt_as=PromptAs.IDS, trace=TraceSettings(8)
    ).requests
    assert [r.at_s for r in (first, second, third)] == [0.0, 1.0, 1.25]
    assert [(r.input_tokens, len(r.prompt), r.output_tokens) for r in (first, second, third)] == [
        (20, 20, 3),
        (16, 16, 4),
        (21, 21, 5),
    ]
    assert first.hash_ids == (0, 1, 2)
    assert first.prompt[:16] == second.prompt
    assert third.prompt[:8] == first.prompt[:8]
    assert third.prompt[8:16] != first.prompt[8:16]


def test_the_tail_of_a_trace_may_have_no_hash_and_is_then_shared_with_nobody(made: Any) -> None:
    trace = _lines(
        _traced(0, 20, 1, 0, 1),
        _traced(1, 20, 1, 0, 1),
        {"timestamp": 2, "input_length": 9, "output_length": 1},
    )
    first, second, third = made(
        DatasetName.JSONL_TRACE, trace, prompt_as=PromptAs.IDS, trace=TraceSettings(8)
    ).requests
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]
    assert (len(third.prompt), third.hash_ids) == (9, ())


def _recorded(started_at: float, block_size: int) -> dict[str, object]:
    head = {"block_size": block_size, "started_at": started_at, "server": "twinpool"}
    return {**_traced(0, 20, 1, 0, 1), "twinpool": head}


def test_a_record_of_the_server_says_how_long_its_blocks_are(made: Any) -> None:
    record = _lines(_recorded(1e9, 8), _traced(1, 19, 1, 0, 2))
    first, second = made(DatasetName.JSONL_TRACE, record, prompt_as=PromptAs.IDS).requests
    assert first.prompt[:8] == second.prompt[:8]
    assert first.prompt[8:16] != second.prompt[8:16]
    with pytest.raises(ConfigError, match="--trace-block-size 512"):
        made(DatasetName.JSONL_TRACE, record, trace=TraceSettings(512))


def test_records_of_two_starts_of_a_server_are_not_one_trace(made: Any) -> None:
    made(DatasetName.JSONL_TRACE, _lines(_recorded(1e9, 8), _recorded(1e9, 8)))
    with pytest.raises(ConfigError, match="records of 2 starts of a server"):
        made(DatasetName.JSONL_TRACE, _lines(_recorded(1e9, 8), _recorded(2e9, 8)))


def test_a_window_and_a_number_take_a_part_of_a_trace(made: Any) -> None:
    trace = _lines(*(_traced(1000 * n, 5, 1) for n in range(20)))
    window = TraceSettings(start_s=4, window_s=10, speed=2)
    workload = made(DatasetName.JSONL_TRACE, trace, 3, trace=window)
    assert [r.at_s for r in workload.requests] == [0.0, 0.5, 1.0]
    assert workload.notes == ()
    workload = made(DatasetName.JSONL_TRACE, trace, 30, trace=window)
    assert len(workload.requests) == 10
    assert workload.notes == ("there are 10 requests, not 30",)
    with pytest.raises(ConfigError, match=r"its 20 requests come within 19\.0 s"):
        made(DatasetName.JSONL_TRACE, trace, trace=TraceSettings(start_s=40))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("timestamp,input\n1,2\n", "line 1 of .* is not a request with timestamp"),
        (_lines(_traced(0, 5, 5), {"timestamp": 0}), "line 2 of .* missing required field `input_length`"),
        (_lines(_traced(0, -5, 5)), "line 1 of .* has -5 input tokens, 5 output tokens"),
        (_lines(_traced(0, 0, 5)), "no request with at least one token in and out"),
        (
            _lines(_traced(0, 100, 5, 1, 2)),
            "100 input tokens and 2 hash_ids.* --trace-block-size 512: 1 were",
        ),
    ],
)
def test_a_jsonl_trace_that_is_wrong_says_where(made: Any, content: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(DatasetName.JSONL_TRACE, content)


def test_requests_without_output_are_left_out_and_counted(made: Any) -> None:
    workload = made(DatasetName.JSONL_TRACE, _lines(_traced(0, 9, 0), _traced(5000, 9, 2)))
    assert [(r.index, r.at_s, r.output_tokens) for r in workload.requests] == [(0, 0.0, 2)]
    assert workload.notes == ("1 requests without a token in or out were left out",)


@pytest.mark.parametrize(
    "content",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:05.4799600,30,8\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,GPT-4,48,10,58,x\n6.5,GPT-4,30,8,38,x\n",
        "\ufeffarrival_timestamp_ms,input_len,output_len\r\n100,48.0,10\r\n1600,30.0,8\r\n",
        "output_length,input_length,time\n8,30,2024-05-10 00:00:01.5+00:00\n10,48,2024-05-10 00:00:00\n",
    ],
    ids=["azure", "burstgpt", "milliseconds", "another order"],
)
def test_csv_traces_are_known_by_their_headers(made: Any, content: str) -> None:
    requests = made(DatasetName.CSV_TRACE, content).requests
    assert [r.at_s for r in requests] == [0.0, pytest.approx(1.5)]
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(48, 10), (30, 8)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("time,input_tokens\n1,2\n", "no column for the output tokens; its header is time, input_tokens"),
        (
            "time,timestamp,input_len,output_len\n1,1,2,3\n",
            r"2 columns for the arrival time \(time, timestamp\)",
        ),
        ("time,input_len,output_len\n1,2,3\nsoon,2,3\n", "line 3 of .* but 'soon', '2', '3'"),
        ("time,input_len,output_len\n1,2.5,3\n", "line 2 of .* '2.5'"),
        ("time,input_len,output_len\n1,2\n", "line 2 of .* ''"),
        ("time,input_len,output_len\nnan,2,3\n", "the time nan s; lengths are 0 or more, times finite"),
        ("time,input_len,output_len\n", "no request"),
        (b"\xff\xfe\x00", "is no text"),
    ],
)
def test_a_csv_trace_that_is_wrong_says_where(made: Any, content: str | bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(DatasetName.CSV_TRACE, content)


def test_a_file_that_is_not_there_is_named() -> None:
    settings = DatasetSettings(DatasetName.CSV_TRACE, "/nowhere/trace.csv")
    with pytest.raises(ConfigError, match=r"'/nowhere/trace\.csv', which cannot be read: No such file"):
        make_workload(settings, byte_level(), 1, 0)


def _record(index: int, intended_at_s: float) -> RequestRecord:
    return RequestRecord(
        index=index,
        request_id=f"r{index}",
        group="chat",
        intended_at_s=intended_at_s,
        sent_at_s=intended_at_s + 0.2,
        ended_at_s=intended_at_s + 3,
        ending=Ending.COMPLETED,
        input_tokens=11 + index,
        wanted_output_tokens=7,
        output_tokens=3,
        chunks=(Chunk(1.0, 3),),
        token_count=TokenCount.USAGE,
    )


RECORDS = tuple(_record(index, 2.0 + index) for index in range(3))


@pytest.mark.parametrize(
    "content",
    [
        encode_run(Run(started_at="", duration_s=9, requests=RECORDS, senders=(), settings={})),
        b"\n".join(encode_run(record) for record in RECORDS),  # type: ignore[arg-type]
    ],
    ids=["run", "lines"],
)
def test_our_records_are_sent_again_as_they_were_meant(made: Any, content: bytes) -> None:
    workload = made(DatasetName.RECORDS, content)
    assert [(r.at_s, r.input_tokens, r.output_tokens, r.group) for r in workload.requests] == [
        (0.0, 11, 7, "chat"),
        (1.0, 12, 7, "chat"),
        (2.0, 13, 7, "chat"),
    ]
    assert "share no prefixes" in workload.notes[0]


@pytest.mark.parametrize("content", ['{"requests": 3}', '{"a": 1}\n{"b": 2}'])
def test_a_file_that_holds_no_records_is_refused(made: Any, content: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a recorded run|is not a request's record"):
        made(DatasetName.RECORDS, content)


QUESTION, ANSWER = "bana kena lona mina tuna", "bara kera lora mira"


def _conversations(*pairs: tuple[str, str]) -> str:
    return json.dumps(
        [
            {
                "id": n,
                "conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": a}, {"value": "x"}],
            }
            for n, (p, a) in enumerate(pairs)
        ]
    )


def test_sharegpt_takes_the_first_question_and_the_length_of_its_answer(made: Any) -> None:
    content = _conversations((QUESTION, ANSWER), ("ba", ANSWER), (QUESTION, "ba"))
    (request,) = made(DatasetName.SHAREGPT, content, tokenizer=metaspace()).requests
    assert request.prompt == QUESTION
    assert request.input_tokens == len(metaspace().encode(QUESTION).ids)
    assert request.output_tokens == len(metaspace().encode(ANSWER, add_special_tokens=False).ids)
    assert {r.output_tokens for r in made(DatasetName.SHAREGPT, content, output_len=9).requests} == {9}


def test_sharegpt_entries_are_shuffled_by_the_seed_unless_told_not_to(made: Any) -> None:
    content = _conversations(*((f"{QUESTION} {n}", ANSWER) for n in range(30)))
    ordered = [r.prompt for r in made(DatasetName.SHAREGPT, content, shuffle=False).requests]
    shuffled = [r.prompt for r in made(DatasetName.SHAREGPT, content).requests]
    assert ordered == [f"{QUESTION} {n}" for n in range(30)]
    assert shuffled != ordered
    assert sorted(shuffled) == sorted(ordered)
    assert shuffled == [r.prompt for r in made(DatasetName.SHAREGPT, content).requests]


def test_custom_lines_have_prompts_or_messages_and_lengths_of_their_own(made: Any) -> None:
    content = _lines(
        {"prompt": QUESTION},
        {"prompt": QUESTION, "output_tokens": 5, "group": "short", "something": "else"},
        {
            "messages": [{"role": "system", "content": ANSWER}, {"role": "user", "content": QUESTION}],
            "max_tokens": 6,
        },
    )
    plain, short, chat = made(DatasetName.CUSTOM, content, shuffle=False).requests
    assert [(r.output_tokens, r.group) for r in (plain, short, chat)] == [(256, ""), (5, "short"), (6, "")]
    assert isinstance(chat.prompt, Chat)
    assert chat.input_tokens == sum(len(byte_level().encode(text).ids) for text in (QUESTION, ANSWER))


@pytest.mark.parametrize(
    "line",
    [{}, {"prompt": ""}, {"prompt": "a", "messages": []}, {"prompt": "a", "output_tokens": 0}, {"prompt": 5}],
)
def test_custom_lines_that_are_no_requests_are_named(made: Any, line: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="line 2 of"):
        made(DatasetName.CUSTOM, _lines({"prompt": QUESTION}, line))


def test_prompts_of_a_file_are_cut_where_a_token_ends(made: Any) -> None:
    content = _lines(
        {"prompt": " ".join([QUESTION] * 9), "output_tokens": 5}, {"prompt": QUESTION, "output_tokens": 5}
    )
    settings = {"max_model_len": 20, "tokenizer": metaspace(), "shuffle": False}
    with pytest.raises(ConfigError, match="say --too-long clip or drop"):
        made(DatasetName.CUSTOM, content, **settings)
    workload = made(DatasetName.CUSTOM, content, too_long=TooLong.CLIP, **settings)
    cut, whole = workload.requests
    assert len(metaspace().encode(cut.prompt).ids) == cut.input_tokens == 15
    assert " ".join([QUESTION] * 9).startswith(cut.prompt)
    assert whole.prompt == QUESTION
    assert workload.notes == ("1 requests were clipped: they are longer than the context of 20 tokens",)
    (kept,) = made(DatasetName.CUSTOM, content, too_long=TooLong.DROP, **settings).requests
    assert kept.prompt == QUESTION
    with pytest.raises(ConfigError, match="are as they are"):
        made(DatasetName.CUSTOM, content, too_long=TooLong.SCALE)


def test_prompts_of_a_file_can_be_sent_as_ids_but_chats_cannot(made: Any) -> None:
    (request,) = made(DatasetName.CUSTOM, _lines({"prompt": QUESTION}), prompt_as=PromptAs.IDS).requests
    assert request.prompt == tuple(byte_level().encode(QUESTION).ids)
    chat = _lines({"messages": [{"role": "user", "content": QUESTION}]})
    with pytest.raises(ConfigError, match="--prompt-as ids"):
        made(DatasetName.CUSTOM, chat, prompt_as=PromptAs.IDS)


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", "[]"])
def test_a_sharegpt_file_without_conversations_is_refused(made: Any, content: str) -> None:
    with pytest.raises(ConfigError, match=r"ShareGPT's format|no usable request"):
        made(DatasetName.SHAREGPT, content)
