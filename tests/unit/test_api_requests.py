"""Bodies that are refused, and the sentence that says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinpool.coordinator.gateway.bodies import NOT_SUPPORTED
from twinpool.coordinator.gateway.requests import Conversation, parse_chat, parse_completion
from twinpool.errors import ContextLengthExceeded, InvalidRequest
from twinpool.messages import Generate, decode, encode
from twinpool.request import Job


def completion(**fields: object) -> Any:
    return parse_completion(json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields: object) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    return parse_chat(json.dumps({"messages": messages, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": "hot"}, "temperature", 'temperature is "hot"; it must be a number'),
        ({"temperature": -1}, "temperature", "temperature is -1; it must be a number >= 0.0"),
        ({"temperature": 1e-9}, "temperature", "it must be 0 (greedy) or at least 0.001"),
        ({"temperature": 1e7}, "temperature", "temperature is 10000000.0; it must be a number <= 1000000.0"),
        ({"timeout": int("1" * 400)}, "timeout", "11...; it must be a smaller number"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "it must be a list of length <= 1024"),
        ({"temperature": True}, "temperature", "temperature is true; it must be a number"),
        ({"top_p": 0}, "top_p", "top_p is 0; it must be a number > 0.0"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5; it must be a number <= 1.0"),
        ({"top_k": -2}, "top_k", "top_k is -2; it must be an integer >= -1"),
        ({"min_p": 2}, "min_p", "min_p is 2; it must be a number <= 1.0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer >= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be an integer"),
        ({"max_tokens": "9"}, "max_tokens", 'max_tokens is "9"; it must be an integer'),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1; it must be an integer >= 0"),
        ({"seed": 2**63}, "seed", "it must be an integer <= 9223372036854775807"),
        ({"stream": "yes"}, "stream", 'stream is "yes"; it must be true or false'),
        ({"stop": 5}, "stop", "stop is 5; it must be a string or a list"),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] is 5; it must be a string"),
        ({"stop": ["a", ""]}, "stop", "stop has an empty string"),
        ({"stop": ["a"] * 65}, "stop", "it must be a list of length <= 64"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "it must be an integer >= 0"),
        ({"prompt": 5}, "prompt", "prompt is 5; it must be a string or a list"),
        ({"prompt": []}, "prompt", "prompt is an empty list"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt is a list of 2 prompts; send one request for each"),
        ({"prompt": [1, "b"]}, "prompt", "prompt is a list of 2 prompts; send one request for each"),
        ({"prompt": [1, -2]}, "prompt[1]", "prompt[1] is -2; it must be an integer >= 0"),
        ({"prompt": None}, "prompt", "prompt is null; it must be a string or a list"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true or leave it out"),
        ({"stream": True, "stream_options": 1}, "stream_options", "it must be an object"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "send one of them"),
        ({"n": 2}, "n", "n is 2, which is not supported yet; leave it out or set it to 1"),
        ({"logprobs": 0}, "logprobs", "logprobs is 0, which is not supported yet"),
        ({"logit_bias": {"5": 1}}, "logit_bias", 'logit_bias is {"5":1}, which is not supported yet'),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_to_change(
    fields: dict[str, object], param: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**fields)
    assert refused.value.param == param
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ("hi", "messages", "messages is a string of 2 characters; it must be a list"),
        ([], "messages", "it must be a list of length >= 1"),
        (["hi"], "messages[0]", "messages[0] is a string of 2 characters; it must be an object"),
        ([{}], "messages[0].role", "messages[0].role is missing"),
        ([{"role": "boss", "content": "x"}], "messages[0].role", "it must be one of system, developer, user"),
        ([{"role": "user", "content": 3}], "messages[0].content", "it must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
            'has the type "image_url"; only parts of the type "text"',
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls",
            "messages[0].tool_calls is not supported yet",
        ),
    ],
)
def test_a_wrong_message_is_named(messages: object, param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=messages)
    assert refused.value.param == param
    assert said in refused.value.message


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt is missing") as refused:
        parse_completion(b"{}")
    assert refused.value.param == "prompt"


def test_a_long_value_is_quoted_in_part() -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(temperature="x" * 10_000)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("field", NOT_SUPPORTED)
def test_null_and_harmless_values_of_unsupported_fields_are_accepted(field: str) -> None:
    for value in (None, *NOT_SUPPORTED[field]):
        completion(**{field: value})
    with pytest.raises(InvalidRequest, match=f"^{field} is"):
        completion(**{field: "something else"})


def test_unknown_fields_are_ignored() -> None:
    assert completion(user="me", metadata={"a": [1]}, made_up=1) == completion()


def test_null_means_absent() -> None:
    names = (
        "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "temperature",
        "top_p", "top_k", "min_p", "seed", "ignore_eos", "stop", "stop_token_ids", "cache_salt",
    )  # fmt: skip
    assert completion(**dict.fromkeys(names)) == completion()


def test_top_k_minus_one_is_off() -> None:
    assert completion(top_k=-1).top_k == 0


def test_a_request_that_asks_for_huge_numbers_can_be_sent_to_a_worker() -> None:
    request = completion(top_k=2**70, seed=2**63 - 1, temperature=1e6, prompt=[1])
    job = Job("r", 1, (1,), request.sampling(1, 64, default_max_tokens=16), (0,))
    assert decode(encode(Generate(job))) == Generate(job)


@pytest.mark.parametrize("name", ["self", "messages", "tools"])
def test_template_arguments_that_the_server_sets_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs has {name}"):
        chat(chat_template_kwargs={name: 1})


def test_one_stop_string_needs_no_list() -> None:
    assert completion(stop="x").stop == completion(stop=["x"]).stop == ("x",)


def test_text_parts_of_a_message_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": content}, {"role": "assistant", "content": None}])
    assert request.prompt == Conversation(
        ({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""}), {}
    )


def test_arguments_of_the_template_cannot_replace_the_servers() -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs has messages"):
        chat(chat_template_kwargs={"messages": []})


def test_the_output_limit_has_two_names() -> None:
    assert completion(max_completion_tokens=5) == completion(max_tokens=5)
    assert completion(max_completion_tokens=5, max_tokens=5) == completion(max_tokens=5)


def test_the_answer_takes_what_the_context_leaves() -> None:
    assert chat().sampling(10, 100, default_max_tokens=None).max_tokens == 90
    assert completion().sampling(10, 100, default_max_tokens=16).max_tokens == 16
    assert completion().sampling(99, 100, default_max_tokens=16).max_tokens == 1
    assert completion(max_tokens=90).sampling(10, 100, default_max_tokens=16).max_tokens == 90


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, 91), (100, 1), (100, None), (101, None)])
def test_what_does_not_fit_the_context_is_refused(num_prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthExceeded, match="shorten the prompt"):
        completion(max_tokens=max_tokens).sampling(num_prompt, 100, default_max_tokens=16)
