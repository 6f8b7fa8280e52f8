"""Grammars over a small tokenizer: what may follow, where an answer may end, what is refused and why."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.gateway import tiny_tokenizer
from support.jobs import job
from support.made_tokenizers import metaspace, wordpiece

from twinpool.coordinator.gateway.structured import MAX_CHOICE_TEXTS
from twinpool.engine import grammars as grammars_module
from twinpool.engine import lark
from twinpool.engine.grammars import Compiler, Grammars, LLParserLimits, Matcher, in_lark
from twinpool.errors import InvalidRequest, InvariantViolation, ModelError
from twinpool.request import Grammar, GrammarKind, Job, RequestKey

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "é😀", 'a"b\\']
EOS = tiny_tokenizer().eos_token_ids[0]
NUM_LOGITS = 400
"""More than the tokenizer has tokens, as in models whose head is padded."""


@cache
def compiler() -> Compiler:
    tokenizer = tiny_tokenizer()
    return Compiler(tokenizer.backend.to_str(), NUM_LOGITS, tokenizer.eos_token_ids)


def json_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


def written_in_lark(source: str) -> Grammar:
    return Grammar(GrammarKind.LARK, source)


def gbnf(source: str) -> Grammar:
    return Grammar(GrammarKind.GBNF, source)


def matcher_of(grammar: Grammar) -> Matcher:
    return compiler().compile(grammar)


def allowed(matcher: Matcher) -> set[int]:
    """The tokens that may follow."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def matches(grammar: Grammar, text: str | Sequence[int]) -> bool:
    """Whether an answer may be exactly `text`: each token is allowed by the mask before it, and so is the end."""
    matcher = matcher_of(grammar)
    for token_id in [*(tiny_tokenizer().encode(text) if isinstance(text, str) else text), EOS]:
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
        assert not matcher.error
    return True


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


class _Counting(Compiler):
    def __init__(self) -> None:
        tokenizer = tiny_tokenizer()
        super().__init__(tokenizer.backend.to_str(), NUM_LOGITS, tokenizer.eos_token_ids)
        self.num_compiled = 0

    def compile(self, grammar: Grammar) -> Matcher:
        self.num_compiled += 1
        return super().compile(grammar)


def with_grammar(grammar: Grammar, name: str = "a") -> Job:
    return job(name, 3, grammar=grammar)


def test_who_asks_for_a_prepared_matcher_has_it_alone() -> None:
    counting = _Counting()
    grammars = Grammars(lambda: iter([counting]))
    jobs = [
        with_grammar(regex(source), source + name) for source, name in (("ab", "1"), ("cd", ""), ("ab", "2"))
    ]
    for each in jobs:
        grammars.prepare(each)
    first, second = grammars.matcher(jobs[0]), grammars.matcher(jobs[2])
    assert counting.num_compiled == 3
    third = grammars.matcher(jobs[0])
    assert counting.num_compiled == 4, "nobody prepared it a second time"
    first.accept(*tiny_tokenizer().encode("a"))
    assert allowed(first) != allowed(second) == allowed(third)


def test_what_is_prepared_is_for_that_job_and_that_grammar() -> None:
    grammars = Grammars(lambda: iter([compiler()]))
    grammars.prepare(with_grammar(regex("ab")))
    assert allowed(grammars.matcher(with_grammar(regex("cd")))) == allowed(matcher_of(regex("cd")))
    grammars.prepare(job("a", 3))  # of a job without a grammar there is nothing to prepare
    with pytest.raises(InvariantViolation, match="has no grammar"):
        grammars.matcher(job("a", 3))


def test_what_a_job_leaves_behind_is_forgotten_with_it() -> None:
    counting = _Counting()
    grammars = Grammars(lambda: iter([counting]))
    kept = []
    for _ in range(3):
        grammars.prepare(with_grammar(regex("a")))
        kept.append(weakref.ref(grammars._ready[with_grammar(regex("a")).key].matcher))
    grammars.forget(RequestKey("another", 0))
    assert [ref() is not None for ref in kept] == [False, False, True], (
        "a second one takes the place of the first"
    )
    grammars.forget(with_grammar(regex("a")).key)
    assert kept[-1]() is None
    grammars.matcher(with_grammar(regex("a")))
    assert counting.num_compiled == 4


@pytest.mark.parametrize(("most", "most_chars", "num_kept"), [(3, 1000, 3), (99, 45, 4), (99, 9, 0)])
def test_so_many_are_kept_and_no_longer_ones_the_latest_of_them(
    most: int, most_chars: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MOST_READY", most)
    monkeypatch.setattr(grammars_module, "MOST_READY_CHARS", most_chars)
    counting = _Counting()
    grammars = Grammars(lambda: iter([counting]))
    jobs = [with_grammar(regex("a" * 10), str(number)) for number in range(6)]
    for each in jobs:
        grammars.prepare(each)
    for each in reversed(jobs):
        grammars.matcher(each)
    assert counting.num_compiled == 6 + 6 - num_kept
    for each in jobs:  # what was taken counts no more
        grammars.prepare(each)
    assert len(grammars._ready) == num_kept


def test_many_threads_load_the_tokenizer_once() -> None:
    loaded: list[Compiler] = []

    def load() -> Iterator[Compiler]:
        loaded.append(_Counting())
        yield loaded[-1]

    grammars = Grammars(load)
    jobs = [with_grammar(json_schema(SCHEMA), str(number)) for number in range(32)]
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(grammars.matcher, jobs))
    assert len(loaded) == 1
    assert len(set(map(id, matchers))) == 32


def test_what_the_first_grammar_takes_is_done_ahead_in_pieces_and_the_first_one_does_the_rest() -> None:
    done: list[int] = []

    def load() -> Iterator[Compiler | None]:
        for piece in range(3):
            done.append(piece)
            yield None
        yield compiler()

    grammars = Grammars(load)
    assert [grammars.get_ahead() for _ in range(2)] == [False, False]
    assert done == [0, 1]
    assert not grammars.matcher(with_grammar(regex("a"))).error
    assert done == [0, 1, 2]
    assert grammars.get_ahead()
    assert Grammars(lambda: iter([compiler()])).get_ahead()


def test_a_compiler_that_is_finished_later_gives_the_same_masks() -> None:
    tokenizer = tiny_tokenizer()
    args = (tokenizer.backend.to_str(), NUM_LOGITS, tokenizer.eos_token_ids)
    later = Compiler(*args, is_to_be_finished=True)
    before = later.compile(json_schema(SCHEMA))
    later.finish()
    after = later.compile(json_schema(SCHEMA))
    assert allowed(before) == allowed(after) == allowed(matcher_of(json_schema(SCHEMA)))


def test_after_a_failure_whoever_comes_next_begins_anew() -> None:
    failures = iter([ModelError("unreadable"), None])

    def load() -> Iterator[Compiler]:
        if (failure := next(failures)) is not None:
            raise failure
        yield compiler()

    grammars = Grammars(load)
    with pytest.raises(ModelError, match="unreadable"):
        grammars.get_ahead()
    assert not grammars.matcher(with_grammar(regex("a"))).error


def test_how_far_an_answer_may_go_does_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lexer may have so many states for each of them, and this expression has thousands."""
    monkeypatch.setattr(
        grammars_module, "_LIMITS", LLParserLimits(max_lexer_states=200, verbose_errors=False)
    )
    grammars = Grammars(lambda: iter([compiler()]))
    for seed in range(20):
        matcher = grammars.matcher(with_grammar(regex("(a|b)*a(a|b){12}")))
        text = "".join(random.Random(seed).choices("ab", k=40))
        for token_id in tiny_tokenizer().encode(text):
            assert token_id in allowed(matcher)
            matcher.accept(token_id)
        assert not matcher.error


@pytest.mark.parametrize("ask", [Grammars.prepare, Grammars.matcher])
def test_a_grammar_that_cannot_be_compiled_is_refused(ask: Callable[[Grammars, Job], object]) -> None:
    with pytest.raises(InvalidRequest, match="unclosed group"):
        ask(Grammars(lambda: iter([compiler()])), with_grammar(regex("(a")))


def test_a_models_own_tokenizer_is_read_when_the_first_grammar_comes(tmp_path: Path) -> None:
    grammars = Grammars.of_model(tmp_path / "nowhere", NUM_LOGITS)
    with pytest.raises(ModelError):
        grammars.prepare(with_grammar(regex("a")))
