"""Forced calls: whatever a model may write under the grammar is read back as calls that obey the functions' schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from support.tool_answers import (
    EOS,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN,
    joined,
    tokenizer_of,
)

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallBegin
from twinpool.coordinator.gateway.tools import AnswerFormat, ToolCalls, ToolPlan, Tools, plan, tool_fields
from twinpool.engine.grammars import Compiler
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest
from twinpool.request import Grammar, GrammarKind

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
MODELS = {
    "qwen": tokenizer_of(QWEN, MARKS),
    "qwen, marks as text": tokenizer_of(QWEN),
    "llama": tokenizer_of(LLAMA, special=SPECIAL),
    "mistral": tokenizer_of(MISTRAL, special=SPECIAL),
    "mistral, named": tokenizer_of(MISTRAL_NAMED, special=SPECIAL),
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Köln"]},
        "days": {"$ref": "#/$defs/days"},
        "hourly": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "$defs": {
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2}
    },
}
TOOLS = msgspec.convert(
    [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "weather-map"}},
    ],
    Tools,
)
NUM_WALKS = 8
PROMPT = "…assistant\n"


def required(tokenizer: Tokenizer) -> ToolPlan:
    return plan(TOOLS, "required", None, AnswerFormat.of(tokenizer, GatewayConfig()))


def walk(tokenizer: Tokenizer, grammar: Grammar, seed: int, most_tokens: int = 2000) -> list[int]:
    """Tokens that a model might choose, the marks of calls and reasoning more often than others, and no EOS."""
    compiler = Compiler(tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    matcher = compiler.compile(grammar)
    (eos,) = tokenizer.eos_token_ids
    draw = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < most_tokens:
        words = matcher.mask()
        assert not matcher.error
        allowed = [i for i in range(tokenizer.vocab_size) if words[i // 32] >> (i % 32) & 1]
        marks = [i for i in allowed if i in tokenizer.added_token_ids.values()]
        token_id = draw.choice(marks if marks and draw.random() < 0.5 else allowed)
        matcher.accept(token_id)
        if token_id == eos:
            return token_ids
        token_ids.append(token_id)
    raise AssertionError("the answer does not end")


def read_back(tokenizer: Tokenizer, wanted: ToolPlan, token_ids: list[int], prompt: str) -> list[Delta]:
    """What the parser makes of the text, which comes token by token, without special tokens but the shown ones."""
    hidden = tokenizer.special_token_ids - wanted.shown_token_ids
    text = tokenizer.decode([i for i in token_ids if i not in hidden], skip_special_tokens=False)
    parser = wanted.parser_after(prompt)()
    return joined([*(delta for char in text for delta in parser.add(char)), *parser.finish()])


def check_calls(deltas: list[Delta]) -> list[dict[str, Any]]:
    """The calls, which are all there is, as a client sends them back."""
    assert deltas
    functions = []
    for begin, arguments in zip(deltas[::2], deltas[1::2], strict=True):
        assert isinstance(begin, ToolCallBegin)
        assert isinstance(arguments, ToolCallArguments)
        value = json.loads(arguments.text)
        if begin.name == "weather":
            assert value["city"] in ("Paris", "Köln")
            assert len(value["days"]) <= 2
            assert all(type(day) is int and 1 <= day <= 9 for day in value["days"])
            assert value.keys() <= {"city", "days", "hourly"}
        else:
            assert (begin.name, value) == ("weather-map", {})
        functions.append({"id": begin.id, "function": {"name": begin.name, "arguments": arguments.text}})
    return functions


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_forced_calls_are_read_back_whatever_the_model_chooses(model: str, seed: int) -> None:
    tokenizer = MODELS[model]
    wanted = required(tokenizer)
    assert wanted.grammar is not None
    token_ids = walk(tokenizer, wanted.grammar, seed)
    functions = check_calls(read_back(tokenizer, wanted, token_ids, PROMPT))
    if model == "mistral":
        return  # its template shows the ids of earlier calls, which the model does not write
    answers = AnswerFormat.of(tokenizer, GatewayConfig())
    fields = tool_fields("", "assistant", answers, tool_calls=msgspec.convert(functions, ToolCalls))
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", **fields}]
    )
    assert tokenizer.decode(token_ids, skip_special_tokens=False) in shown


@pytest.mark.parametrize("model", ["qwen", "qwen, marks as text"])
@pytest.mark.parametrize("prompt", ["…\n", "…\n<think>\n", "…\n<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_come_behind_the_reasoning(model: str, prompt: str, seed: int) -> None:
    tokenizer = MODELS[model]
    wanted = required(tokenizer)
    assert wanted.grammar is not None
    grammar = wanted.answers.after_reasoning(wanted.grammar, prompt)
    if model == "qwen":
        token_ids = walk(tokenizer, grammar, seed)
    else:  # at random the closing tag would never come letter by letter
        token_ids = tokenizer.encode(
            "a</thin</think>\n" if "think>\n" in prompt[-8:] else "<think>a</think>\n"
        )
        token_ids += walk(tokenizer, wanted.grammar, seed)
    deltas = read_back(tokenizer, wanted, token_ids, prompt)
    if "</think>" not in prompt:
        assert not any(isinstance(delta, Content) for delta in deltas)
        check_calls([delta for delta in deltas if not isinstance(delta, Reasoning)])
    assert accepts(tokenizer, grammar, token_ids) == ("</think>" not in prompt or model == "qwen")


def accepts(tokenizer: Tokenizer, grammar: Grammar, token_ids: list[int]) -> bool:
    compiler = Compiler(tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    matcher = compiler.compile(grammar)
    for token_id in (*token_ids, *tokenizer.eos_token_ids):
        matcher.accept(token_id)
    return not matcher.error


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "maximum": 9}'), "7"),
        (Grammar(GrammarKind.REGEX, r"a/\/[/b]" "\n"), "a//b\n"),
        (Grammar(GrammarKind.LARK, 'start: x\nx: "{" | "a"\n'), "{"),
    ],
)
def test_reasoning_may_come_before_any_grammar_and_only_there(grammar: Grammar, text: str) -> None:
    for tokenizer in (MODELS["qwen"], MODELS["qwen, marks as text"]):
        answers = AnswerFormat.of(tokenizer, GatewayConfig())
        for prompt, fits, fails in (
            (PROMPT, (text, f"<think>\nHm.\n</think>\n\n{text}"), (f"Hm.</think>{text}", "<think>Hm.")),
            ("<think>\n", (f"Hm.\n</think>\n\n{text}", f"</think>{text}"), (text,)),
            ("<think>\n\n</think>\n\n", (text,), (f"<think>Hm.</think>{text}",)),
        ):
            whole = answers.after_reasoning(grammar, prompt)
            for answer in fits:
                assert accepts(tokenizer, whole, tokenizer.encode(answer)), (prompt, answer)
            for answer in fails:
                assert not accepts(tokenizer, whole, tokenizer.encode(answer)), (prompt, answer)


def test_white_space_in_json_is_bounded_behind_reasoning_too() -> None:
    tokenizer = MODELS["qwen"]
    schema = Grammar(
        GrammarKind.JSON_SCHEMA, '{"type": "array", "x-guidance": {"whitespace_pattern": "[ ]+"}}'
    )
    whole = AnswerFormat.of(tokenizer, GatewayConfig()).after_reasoning(schema, "<think>\n")
    for space, is_fine in ((" ", True), ("  ", False)):
        answer = tokenizer.encode(f"Hm.\n</think>\n\n[1,{space}2]")
        assert accepts(tokenizer, whole, answer) == is_fine


def test_what_cannot_be_enforced_is_an_error_for_strict_functions_only() -> None:
    tokenizer = MODELS["qwen"]
    compiler = Compiler(tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    answers = AnswerFormat.of(tokenizer, GatewayConfig())
    for strict in (False, True):
        function = {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": strict}
        tools = msgspec.convert([{"type": "function", "function": function}], Tools)
        grammar = plan(tools, "required", None, answers).grammar
        assert grammar is not None
        if not strict:
            compiler.compile(grammar)
            continue
        with pytest.raises(InvalidRequest, match="not"):
            compiler.compile(grammar)


def test_the_end_of_an_answer_is_the_only_token_behind_the_last_call() -> None:
    tokenizer = MODELS["llama"]
    wanted = required(tokenizer)
    assert wanted.grammar is not None
    assert not accepts(
        tokenizer, wanted.grammar, tokenizer.encode('{"name": "weather-map", "parameters": {}} ')
    )
    assert accepts(tokenizer, wanted.grammar, tokenizer.encode('{"name": "weather-map", "parameters": {}}'))
    assert tokenizer.decode(tokenizer.eos_token_ids, skip_special_tokens=False) == EOS
