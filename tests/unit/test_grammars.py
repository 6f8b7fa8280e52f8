"""Grammars over a small tokenizer: what may follow, where an answer may end, what is refused and why."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.gateway import tiny_tokenizer
from support.made_grammars import (
    CHOICES,
    EOS,
    NUM_LOGITS,
    SCHEMA,
    allowed,
    compiler,
    gbnf,
    json_schema,
    matcher_of,
    matches,
    regex,
    written_in_lark,
)
from support.made_tokenizers import metaspace, wordpiece

from twinpool.coordinator.gateway.structured import MAX_CHOICE_TEXTS
from twinpool.engine import grammars as grammars_module
from twinpool.engine import lark
from twinpool.engine.grammars import Compiler, in_lark
from twinpool.errors import InvalidRequest, ModelError
from twinpool.request import Grammar, GrammarKind


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (
            json_schema(SCHEMA),
            ['{"name":"Ada","age":36}', '{"name": "é\\n", "age": 0}', '{\n  "name": "",\n  "age": 7\n}'],
            [
                "",
                "{}",
                '{"name":"Ada","age":-1}',
                '{"name":"Ada"}',
                '{"name":"Ada","age":36} ',
                '{"age":1,"name":"Ada"}',
            ],
        ),
        (json_schema({"type": "object"}), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{"]),
        (json_schema({"anyOf": [{"type": "null"}, {"const": "x"}]}), ["null", '"x"'], ['"y"', "x"]),
        (regex(r"[a-z]+@[a-z]+\.(com|org)"), ["me@there.org"], ["me@there", "me@there.org.", "@a.com"]),
        (regex(r"^\d{3}$"), ["123"], ["12", "1234"]),
        (
            written_in_lark(f"start: {lark.one_of(CHOICES)}"),
            CHOICES,
            ["", "y", "yesno", "maybe"],
        ),
        (written_in_lark('start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)", "()"]),
        (gbnf('root ::= item ("," item)*\nitem ::= [0-9]+ # numbers'), ["1", "1,22,3"], ["", "1,", "a"]),
        (
            written_in_lark(f"start: {lark.literal('call ')} value\nvalue: {lark.json_value(SCHEMA)}"),
            ['call {"name":"a","age":1}'],
            ['{"name":"a","age":1}', "call {}"],
        ),
    ],
)
def test_an_answer_is_what_its_grammar_says(grammar: Grammar, matching: list[str], others: list[str]) -> None:
    assert [text for text in matching if not matches(grammar, text)] == []
    assert [text for text in others if matches(grammar, text)] == []


def test_an_answer_may_end_exactly_where_the_grammar_is_complete() -> None:
    matcher = matcher_of(regex("a|ab"))
    a, b = tiny_tokenizer().encode("a"), tiny_tokenizer().encode("b")
    assert EOS not in allowed(matcher)
    matcher.accept(*a)
    assert allowed(matcher) == {EOS, *b}
    assert not matcher.is_stopped
    matcher.accept(*b)
    assert matcher.is_stopped
    assert allowed(matcher) == {EOS}
    matcher.accept(EOS)
    assert matcher.error == ""


def test_an_end_that_comes_too_early_is_an_error_that_stays() -> None:
    matcher = matcher_of(regex("ab"))
    matcher.accept(EOS)
    assert "does not allow" in matcher.error
    matcher.accept(*tiny_tokenizer().encode("a"))
    matcher.mask()
    assert "does not allow" in matcher.error


@pytest.mark.parametrize("token_id", [NUM_LOGITS - 1, NUM_LOGITS, 2**31 - 1])
def test_a_token_that_does_not_exist_is_an_error(token_id: int) -> None:
    matcher = matcher_of(regex(".*"))
    assert token_id not in allowed(matcher)
    matcher.accept(token_id)
    assert matcher.error


def test_a_matcher_made_from_the_tokens_so_far_goes_on_like_the_one_that_saw_them_come() -> None:
    """The seam of a hand-off, and resuming: masks are equal from any point on."""
    tokens = [*tiny_tokenizer().encode('{"name": "the quick fox", "age": 120}'), EOS]
    masks: list[bytes] = []
    seen = matcher_of(json_schema(SCHEMA))
    for token_id in tokens:
        masks.append(seen.mask().tobytes())
        seen.accept(token_id)
    for cut in range(len(tokens)):
        new = matcher_of(json_schema(SCHEMA))
        for token_id in tokens[:cut]:  # no mask between: nobody samples these again
            new.accept(token_id)
        assert new.mask().tobytes() == masks[cut]


def test_the_mask_has_a_bit_for_each_logit() -> None:
    mask = matcher_of(regex("(.|\n)*")).mask()
    assert (mask.dtype, mask.shape) == (np.int32, ((NUM_LOGITS + 31) // 32,))
    named = allowed(matcher_of(regex("(.|\n)*")))
    assert max(named) < tiny_tokenizer().vocab_size
    assert named.isdisjoint(tiny_tokenizer().special_token_ids - {EOS})


@pytest.mark.parametrize(
    ("space", "is_fine"),
    [
        ("", True),
        (" ", True),
        ("\n" + 64 * " ", True),
        ("\r\n\t", True),
        ("  ", False),
        ("\n\n", False),
        ("\n" + 65 * " ", False),
    ],
)
def test_white_space_in_json_is_bounded(space: str, is_fine: bool) -> None:
    unbounded = {"type": "array", "x-guidance": {"whitespace_pattern": r"[ \n\r\t]+"}}
    assert matches(json_schema(unbounded), f"[1,{space}2]") == is_fine
    assert matches(written_in_lark(f"start: {lark.json_value(unbounded)}"), f"[1,{space}2]") == is_fine


def test_a_special_token_is_matched_as_that_token_and_its_text_is_text() -> None:
    (start,) = tiny_tokenizer().encode("<|im_start|>")
    for name in (lark.token(start), "<|im_start|>"):
        assert matches(written_in_lark(f'start: {name} "a"'), [start, *tiny_tokenizer().encode("a")])
    assert not matches(written_in_lark(f"start: {lark.literal('<|im_start|>')}"), [start])
    spelled = [token for piece in ("<", "|im_start|>") for token in tiny_tokenizer().encode(piece)]
    assert start not in spelled
    assert matches(written_in_lark(f"start: {lark.literal('<|im_start|>')}"), spelled)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (json_schema({"type": "thing"}), "Invalid type: thing"),
        (json_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (json_schema({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}), "use anyOf"),
        (json_schema({"$ref": "#/$defs/nowhere"}), "'/$defs/nowhere' does not exist"),
        (json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable schema"),
        (json_schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (json_schema([1]), "no JSON object"),
        (json_schema({"type": "integer", "minimum": 10**20}), "a number that is out of range"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{} }, {"lark_grammar": "start: /a/"'), "no JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000), "nested too deeply"),
        (json_schema(json.loads('{"items":' * 500 + "{}" + "}" * 500)), "recursion limit"),
        (regex("(a"), "unclosed group"),
        (regex(r"(a)\1"), "backreferences are not supported"),
        (regex(r"[^\s\S]"), "no token of the model goes on"),
        (written_in_lark("start: nowhere"), 'unknown name: "nowhere"'),
        (written_in_lark('begin: "a"'), "no start rule found"),
        (written_in_lark("start: <|no_such_token|>"), "unknown special token"),
        (written_in_lark("start: " + "(" * 1000 + '"a"' + ")" * 1000), "too deeply nested"),
        (gbnf("root ::= nowhere"), "Rule 'nowhere' not found"),
        (gbnf('item ::= "a"'), "No 'root' rule found"),
        (gbnf('root ::= "a'), "Unexpected end of input"),
        (gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "recursion"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_reason_of_one_line(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiler().compile(grammar)
    assert reason in refusal.value.message
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 400


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" start',
        'start: "a"{1000000}',
        "start: " + " | ".join(f'"a{i}" x' for i in range(2500)) + '\nx: "x"',
    ],
)
def test_a_grammar_that_is_too_complex_behind_its_first_token_is_found_by_trying_one(source: str) -> None:
    matcher = matcher_of(written_in_lark(source))
    with pytest.raises(InvalidRequest, match="too complex to go on with"):
        matcher.try_token()


def test_as_a_terminal_a_choice_may_have_as_many_alternatives_as_a_request_may_name() -> None:
    choices = [f"choice number {number}" for number in range(MAX_CHOICE_TEXTS)]
    grammar = written_in_lark(f"start: CHOICE\nCHOICE: {lark.one_of(choices)}")
    assert matches(grammar, choices[-1])
    assert not matches(grammar, f"choice number {MAX_CHOICE_TEXTS}")


def test_a_grammar_that_would_slow_every_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MASK_LIMIT_S", 0.0)
    with pytest.raises(InvalidRequest, match="each token of the answer would take too long"):
        matcher_of(regex("a" * 20_000)).try_token()


@pytest.mark.parametrize(
    "grammar", [regex("()"), regex("a?"), written_in_lark('start: "a"'), json_schema({})]
)
def test_others_pass_that_trial(grammar: Grammar) -> None:
    matcher = matcher_of(grammar)
    matcher.try_token()
    assert not matcher.error


def test_schemas_may_have_what_the_documentation_says_and_no_more() -> None:
    texts = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
    obeyed: list[dict[str, object]] = [
        *({"type": "string", "format": name} for name in texts),
        {"enum": [1, "a"]},
        {"allOf": [{"type": "string"}, {"minLength": 2}], "maxLength": 3},
        {"oneOf": [{"type": "string"}, {"type": "integer", "multipleOf": 5}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {"type": "object", "patternProperties": {"^a": {}}, "minProperties": 1, "maxProperties": 2},
        {"type": "array", "prefixItems": [{"const": 1}], "minItems": 1, "maxItems": 2},
        {"type": "string", "pattern": "^a+$"},
        {"type": "number", "minimum": 0, "maximum": 9},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
    ]
    refused: list[dict[str, object]] = [
        {"not": {}},
        {"if": {}},
        {"contains": {}},
        {"uniqueItems": True},
        {"propertyNames": {}},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"unevaluatedItems": False},
        {"unevaluatedProperties": False},
        {"type": "string", "format": "iri"},
    ]
    for schema in obeyed:
        assert not matcher_of(json_schema(schema)).error
    for schema in refused:
        with pytest.raises(InvalidRequest):
            matcher_of(json_schema(schema))


def test_a_grammar_that_no_token_can_spell_is_refused() -> None:
    compiler_of_few = Compiler(_without_letters(), NUM_LOGITS, (EOS,))
    assert compiler_of_few.compile(regex("0+"))
    with pytest.raises(InvalidRequest, match="no token of the model goes on"):
        compiler_of_few.compile(regex("[éЖ]"))


def _without_letters() -> str:
    """The tokenizer without the tokens that those two letters begin with."""
    source = json.loads(tiny_tokenizer().backend.to_str())
    vocab = source["model"]["vocab"]
    source["model"]["vocab"] = {text: id_ for text, id_ in vocab.items() if text not in ("Ã", "Ð")}
    return json.dumps(source)


def test_gbnf_becomes_lark_and_everything_else_stays_as_it_is() -> None:
    plain = in_lark(gbnf('root ::= "a" | other-rule\nother-rule ::= [b-d]{2,3}'))
    assert plain.kind is GrammarKind.LARK
    assert all(matches(plain, text) for text in ("a", "bc", "bcd"))
    assert in_lark(regex("a")) == regex("a")


def test_a_tokenizer_that_cannot_be_used_and_a_model_without_an_end_are_named() -> None:
    for tokenizer in ("{}", metaspace().to_str(), wordpiece().to_str()):
        with pytest.raises(ModelError, match="with this model's tokenizer"):
            Compiler(tokenizer, 1000, (1,))
    with pytest.raises(ModelError, match="no token that ends an answer"):
        Compiler(tiny_tokenizer().backend.to_str(), NUM_LOGITS, ())
