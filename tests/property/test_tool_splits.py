"""However an answer's text is cut into pieces, and whatever it is, its deltas add up to the same and lose nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_answers import ids, read

from twinpool.coordinator.gateway.deltas import Content, Delta, DeltaParser, ToolCallArguments, ToolCallBegin
from twinpool.coordinator.gateway.tools.hermes import HermesParser
from twinpool.coordinator.gateway.tools.llama3 import Llama3Parser
from twinpool.coordinator.gateway.tools.mistral import MistralParser
from twinpool.coordinator.gateway.tools.reasoning import ThinkParser

TOOLS = ("f", "weather")
PARSERS: dict[str, Callable[[], DeltaParser]] = {
    "hermes": lambda: HermesParser(ids(), TOOLS),
    "llama": lambda: Llama3Parser(ids(), TOOLS),
    "mistral": lambda: MistralParser(ids(), TOOLS),
    "think, hermes": lambda: ThinkParser(HermesParser(ids(), TOOLS), is_open=False),
    "thinking, llama": lambda: ThinkParser(Llama3Parser(ids(), TOOLS), is_open=True),
    "think, mistral": lambda: ThinkParser(MistralParser(ids(), TOOLS, 1), is_open=False),
}
PARTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    '{"name": "f", "arguments": {"a": "}"}}', '{"name": "weather", "parameters": {}}', '{"name": ', '"f"',
    ', "arguments": ', '"parameters": ', "{", "}", "[", "]", '"', "\\", ",", ";", ":", "null", "f", " ", "\n", "é",
)  # fmt: skip
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(text=texts, places=st.lists(st.integers(0, 1000), max_size=12))
def test_pieces_do_not_matter(name: str, text: str, places: list[int]) -> None:
    whole = read(PARSERS[name](), text)
    assert read(PARSERS[name](), *cut(text, places)) == whole
    assert read(PARSERS[name](), *text) == whole


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_deltas_are_well_formed(name: str, text: str) -> None:
    """Calls are counted from 0, arguments follow their call's begin, and nothing is empty."""
    num_calls = 0
    for delta in read(PARSERS[name](), text):
        match delta:
            case ToolCallBegin(index, _, called):
                assert index == num_calls
                assert called
                num_calls += 1
            case ToolCallArguments(index, written):
                assert index == num_calls - 1
                assert written
            case _:
                assert delta.text


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_text_is_lost_only_where_there_are_calls(name: str, text: str) -> None:
    deltas = read(PARSERS[name](), text)
    if not any(isinstance(delta, ToolCallBegin) for delta in deltas):
        assert deltas == ([Content(text)] if text else [])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), values, max_size=3)


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "mistral, named"])
@settings(max_examples=50, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(TOOLS), arguments), min_size=1, max_size=3),
    is_ascii=st.booleans(),
    is_indented=st.booleans(),
)
def test_any_json_comes_out_as_it_was_written(
    name: str, calls: list[tuple[str, dict[str, object]]], is_ascii: bool, is_indented: bool
) -> None:
    written = [
        (called, json.dumps(value, ensure_ascii=is_ascii, indent=2 if is_indented else None))
        for called, value in calls
    ]
    objects = [f'{{"name": "{called}", "arguments": {text}}}' for called, text in written]
    answer = {
        "hermes": "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects),
        "llama": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "mistral, named": "".join(f"[TOOL_CALLS]{called}[ARGS]{text}" for called, text in written),
    }[name]
    expected: list[Delta] = []
    for index, (called, text) in enumerate(written):
        expected += [ToolCallBegin(index, f"id{index}", called), ToolCallArguments(index, text)]
    assert read(PARSERS[name.partition(",")[0]](), answer) == expected
