"""From a body's fields to what its answer must match."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from twinpool.bounds import MOST_GRAMMAR_CHARS
from twinpool.coordinator.gateway.body_errors import PRIVATE_FIELDS
from twinpool.coordinator.gateway.structured import Constraint, StructuredBody, constraint_of
from twinpool.errors import InvalidRequest
from twinpool.request import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(body: dict[str, Any], *, ignore_eos: bool = False, min_tokens: int = 0) -> Constraint | None:
    struct = msgspec.convert(body, StructuredBody)
    return constraint_of(struct, ignore_eos=ignore_eos, min_tokens=min_tokens)


@pytest.mark.parametrize(
    ("body", "schema", "field"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            SCHEMA, "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            {"type": "object"}, "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA, "guided_json"),
        ({"json_schema": json.dumps(SCHEMA)}, SCHEMA, "json_schema"),
        ({"json_schema": SCHEMA}, SCHEMA, "json_schema"),
    ],
)  # fmt: skip
def test_schemas(body: dict[str, Any], schema: object, field: str) -> None:
    found = read(body)
    assert found is not None
    assert (found.grammar.kind, found.field) == (GrammarKind.JSON_SCHEMA, field)
    assert json.loads(found.grammar.source) == schema


@pytest.mark.parametrize(
    ("kind", "value", "grammar"),
    [
        ("regex", "[ab]+", Grammar(GrammarKind.REGEX, "[ab]+")),
        ("choice", ["yes", 'n"o'], Grammar(GrammarKind.LARK, 'start: CHOICE\nCHOICE: "yes" | "n\\"o"')),
        ("grammar", 'start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
        ("grammar", '%llguidance {}\nstart: "a::=b"', Grammar(GrammarKind.LARK, '%llguidance {}\nstart: "a::=b"')),
        ("grammar", 'root ::= "a"', Grammar(GrammarKind.GBNF, 'root ::= "a"')),
        ("grammar", '# first\n start ::= "a"', Grammar(GrammarKind.GBNF, '# first\n start ::= "a"')),
    ],
)  # fmt: skip
def test_other_kinds_in_both_spellings(kind: str, value: object, grammar: Grammar) -> None:
    assert read({"structured_outputs": {kind: value}}) == Constraint(grammar, f"structured_outputs.{kind}")
    assert read({f"guided_{kind}": value}) == Constraint(grammar, f"guided_{kind}")


def test_sglangs_names() -> None:
    assert read({"regex": "[ab]+"}) == Constraint(Grammar(GrammarKind.REGEX, "[ab]+"), "regex")
    assert read({"ebnf": 'root ::= "a"'}) == Constraint(Grammar(GrammarKind.GBNF, 'root ::= "a"'), "ebnf")


def test_no_error_quotes_them() -> None:
    assert set(StructuredBody.__struct_fields__) <= PRIVATE_FIELDS


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None},
        {"response_format": {"type": "text"}},
    ],
)
def test_nothing_asked_for(body: dict[str, Any]) -> None:
    assert read(body, ignore_eos=True, min_tokens=5) is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", '"structural_tag"'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
            "response_format.json_schema.schema", "is missing",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "asks for nothing"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern", "not supported",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace", "not supported",
        ),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json", "no JSON"),
        ({"guided_json": "true"}, "guided_json", "must be an object"),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"guided_grammar": " \n"}, "guided_grammar", "is empty"),
        ({"guided_regex": "a" * (MOST_GRAMMAR_CHARS + 1)}, "guided_regex", f"at most {MOST_GRAMMAR_CHARS}"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "send one of them"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex", "send one of them",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "send one of them"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_what_to_do(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(body)
    assert refusal.value.param == param
    assert words in refusal.value.message
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"structured_outputs": {"choice": [1]}}, r"structured_outputs\.choice\[0\]"),
        ({"response_format": {}}, "response_format"),
        ({"guided_json": 1}, "guided_json"),
    ],
)
def test_wrong_types_are_found_while_reading(body: dict[str, Any], path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=path):
        msgspec.convert(body, StructuredBody)


@pytest.mark.parametrize(
    ("others", "param"), [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 3}, "min_tokens")]
)
def test_an_answer_that_ends_where_its_grammar_does_cannot_be_told_to_go_on(
    others: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="guided_regex says where the answer ends") as refusal:
        read({"guided_regex": "a"}, **others)
    assert refusal.value.param == param
