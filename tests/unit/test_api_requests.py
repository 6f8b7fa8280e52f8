"""Bodies that are refused, and the sentence that says why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.gateway import tiny_tokenizer
from support.tool_answers import DEEPSEEK_R1, answers_of

from twinpool.bounds import MOST_GRAMMAR_CHARS
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.bodies import NOT_SUPPORTED, ChatBody, CompletionBody
from twinpool.coordinator.gateway.conversations import Conversation
from twinpool.coordinator.gateway.parsing import parse_chat, parse_completion
from twinpool.coordinator.gateway.tools import AnswerFormat
from twinpool.errors import ContextLengthExceeded, InvalidRequest
from twinpool.messages import Generate, decode, encode
from twinpool.request import Grammar, GrammarKind, Job

ANSWERS = AnswerFormat.of(tiny_tokenizer(), GatewayConfig())


def completion(**fields: object) -> Any:
    return parse_completion(json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields: object) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    return parse_chat(json.dumps({"messages": messages, **fields}).encode(), ANSWERS)


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
        (
            {"prompt": [1, "b"]},
            "prompt",
            "prompt is a list of 2 that are not of one kind; send texts, lists of",
        ),
        ({"prompt": ["a", [1]]}, "prompt", "prompt is a list of 2 that are not of one kind"),
        ({"prompt": ["a"] * 129}, "prompt", "which is 129 answers; ask for at most 128 in one request"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "n is 2 for each of 65 prompts, which is 130 answers"),
        ({"prompt": [1, -2]}, "prompt[1]", "prompt[1] is -2; it must be an integer >= 0"),
        ({"prompt": None}, "prompt", "prompt is null; it must be a string or a list"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true or leave it out"),
        ({"stream": True, "stream_options": 1}, "stream_options", "it must be an object"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "send one of them"),
        ({"n": 0}, "n", "n is 0; it must be an integer >= 1"),
        ({"n": 129}, "n", "n is 129; it must be an integer <= 128"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of is 3 and n is 2"),
        ({"best_of": 2}, "best_of", "so leave best_of out"),
        ({"logprobs": -1}, "logprobs", "logprobs is -1; it must be an integer >= 0"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21; it must be an integer <= 20"),
        ({"logprobs": True}, "logprobs", "logprobs is true; it must be how many of the likeliest tokens"),
        (
            {"top_logprobs": 2},
            "top_logprobs",
            "top_logprobs is not a field of this route; send it to /v1/chat",
        ),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "it must be an integer >= 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available in a stream"),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias",
            "logit_bias of token 5 is 101.0; it must be from -100 to 100",
        ),
        (
            {"logit_bias": {"the": 1}},
            "logit_bias",
            'logit_bias has the key "the"; its keys must be token ids',
        ),
        ({"logit_bias": {"²": 1}}, "logit_bias", "its keys must be token ids"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", 'is {"5":"x"}; each of its values must be a number'),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias is [1]; it must be an object"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is []; it must"),
        (
            {"allowed_token_ids": [-1]},
            "allowed_token_ids[0]",
            "allowed_token_ids[0] is -1; it must be an integer >= 0",
        ),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids", "a list of length <= 16384"),
        ({"bad_words": "the"}, "bad_words", 'bad_words is "the"; it must be a list'),
        ({"bad_words": ["the", " "]}, "bad_words", 'bad_words has " ", which is in every answer'),
        ({"bad_words": ["a"] * 1025}, "bad_words", "a list of length <= 1024"),
        ({"presence_penalty": 2.5}, "presence_penalty", "it must be a number <= 2.0"),
        ({"frequency_penalty": -3}, "frequency_penalty", "it must be a number >= -2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "it must be a number > 0.0"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "which leaves no prompt; set it to 1 or more",
        ),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "it must be an integer >= -1"),
        ({"echo": 1}, "echo", "echo is 1; it must be true or false"),
        ({"suffix": "x"}, "suffix", "suffix is a string of 1 characters, which is not supported here"),
        ({"continue_final_message": True}, "continue_final_message", "send it to /v1/chat/completions"),
        ({"metadata": 5}, "metadata", "metadata is 5; it must be an object"),
        ({"ignore_eos": True, "guided_regex": "a+"}, "ignore_eos", "guided_regex says where the answer ends"),
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
            "messages[0].tool_calls[0].function",
            "messages[0].tool_calls[0].function is missing",
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


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is 2, but logprobs is not true"),
        ({"logprobs": 2}, "logprobs", "logprobs is 2; it must be true or false"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer >= 1"),
        (
            {"echo": True},
            "echo",
            "echo is not a field of this route; send it to /v1/completions",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "are both true",
        ),
        (
            {"chat_template": "{{ x }}"},
            "chat_template",
            "is a string of 7 characters, which is not supported",
        ),
        (
            {"documents": ["x"]},
            "documents[0]",
            "documents[0] is a string of 1 characters; it must be an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "chat template takes no tools",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", "it must be"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert said in refused.value.message


def test_fields_that_change_nothing_are_taken() -> None:
    fields = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "k", "best_of": 1, "n": 1, "logprobs": False, "logit_bias": {},
    }  # fmt: skip
    assert completion(**fields) == completion()
    further = {
        "verbosity": "low",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "documents": [],
    }
    assert chat(**fields, **further) == chat()


def test_fields_that_nobody_has_heard_of_are_named() -> None:
    assert completion(made_up=1, other=2).warnings == ("ignored fields: made_up, other",)
    assert chat(made_up=1, echo=None, other=None).warnings == ("ignored fields: made_up",)
    (many,) = completion(**{f"{number:>03}" + "x" * 10_000: 1 for number in range(1000)}).warnings
    assert (many.count("x"), many.count(",")) == (16 * 61, 15)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_null_means_absent(kind: type[ChatBody] | type[CompletionBody]) -> None:
    names = {*kind.__struct_fields__, *kind.not_supported, *kind.foreign} - {"prompt", "messages"}
    parse = completion if kind is CompletionBody else chat
    assert parse(**dict.fromkeys(names)) == parse()


def test_top_k_minus_one_is_off() -> None:
    assert completion(top_k=-1).top_k == 0


def test_a_request_that_asks_for_huge_numbers_can_be_sent_to_a_worker() -> None:
    biases = {str(token_id): -100 for token_id in range(1024)}
    huge = {"top_k": 2**70, "seed": 2**63 - 1, "temperature": 1e6, "repetition_penalty": 1e6}
    request = completion(**huge, logit_bias=biases, logprobs=20, prompt_logprobs=20, prompt=[1])
    job = Job("r", 1, (1,), request.sampling(1, 64), (0,))
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
    messages = ({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""})
    assert request.prompts == (Conversation(messages, {}),)


def test_the_last_message_may_be_gone_on_with() -> None:
    (conversation,) = chat(
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The "}],
        continue_final_message=True,
    ).prompts
    text = conversation.render(tiny_tokenizer())
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe "
    with pytest.raises(InvalidRequest, match="the last message has no text"):
        chat(messages=[{"role": "assistant"}], continue_final_message=True)


def test_the_template_need_not_begin_an_answer() -> None:
    (conversation,) = chat(add_generation_prompt=False).prompts
    assert conversation.render(tiny_tokenizer()) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_a_prompt_is_one_or_many(prompt: object, prompts: tuple[object, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_to_generate_nothing_the_prompt_must_be_asked_about() -> None:
    for fields in ({"echo": True}, {"prompt_logprobs": 0}):
        request = completion(max_tokens=0, **fields)
        assert (request.is_prompt_only, request.sampling(5, 9).max_tokens) == (True, 1)
    assert completion(max_tokens=0, echo=True, logprobs=3).sampling(5, 9).prompt_logprobs == 3


def test_what_is_told_of_the_prompt_is_the_more_of_what_was_asked() -> None:
    for fields, told in (
        ({"logprobs": 3}, None),
        ({"logprobs": 3, "echo": True}, 3),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, 5),
        ({"echo": True}, None),
        ({"prompt_logprobs": 0}, 0),
    ):
        assert completion(**fields).sampling(5, 99).prompt_logprobs == told


def test_of_a_long_prompt_as_much_is_kept_as_was_asked() -> None:
    assert completion().kept_tokens(100) is None
    assert completion(truncate_prompt_tokens=7).kept_tokens(100) == 7
    assert completion(truncate_prompt_tokens=-1).kept_tokens(100) == 99
    assert completion(truncate_prompt_tokens=-1, max_tokens=20).kept_tokens(100) == 80


def test_arguments_of_the_template_cannot_replace_the_servers() -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs has messages"):
        chat(chat_template_kwargs={"messages": []})


def test_a_grammar_that_has_outgrown_what_a_message_holds_is_refused() -> None:
    in_lark = Grammar(GrammarKind.LARK, "a" * (MOST_GRAMMAR_CHARS + 1))
    written_out = Grammar(GrammarKind.REGEX, "/" * (MOST_GRAMMAR_CHARS // 2))  # each is escaped in Lark
    thinking = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "regex": written_out.source}
    ).encode()
    for request, prompt, grammar, field in (
        (completion(ebnf='root ::= "a"'), "x", in_lark, "ebnf"),
        (parse_chat(thinking, answers_of(DEEPSEEK_R1)), "<think>\n", written_out, "regex"),
    ):
        with pytest.raises(InvalidRequest, match="characters long as a grammar") as refused:
            request.with_prompt(prompt, grammar)
        assert refused.value.param == field
    assert parse_chat(thinking, answers_of(None)).with_prompt("x", written_out).grammar == written_out


def test_the_output_limit_has_two_names() -> None:
    assert completion(max_completion_tokens=5) == completion(max_tokens=5)
    assert completion(max_completion_tokens=5, max_tokens=5) == completion(max_tokens=5)


def test_the_answer_takes_what_the_context_leaves() -> None:
    assert chat().sampling(10, 100).max_tokens == 90
    assert completion().sampling(10, 100).max_tokens == 16
    assert completion().sampling(99, 100).max_tokens == 1
    assert completion(max_tokens=90).sampling(10, 100).max_tokens == 90


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, 91), (100, 1), (100, None), (101, None)])
def test_what_does_not_fit_the_context_is_refused(num_prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthExceeded, match="shorten the prompt"):
        completion(max_tokens=max_tokens).sampling(num_prompt, 100)
