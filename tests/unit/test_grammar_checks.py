"""The process that compiles clients' grammars first: what passes, what is refused, and that it may be lost."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tokenizers
from support.default_model import default_model_dir
from support.gateway import tiny_tokenizer
from support.made_tokenizers import byte_level
from support.server import wait_for

from twinpool.coordinator.gateway import grammar_checks
from twinpool.coordinator.gateway.grammar_checks import GrammarChecks
from twinpool.coordinator.gateway.structured import Constraint
from twinpool.engine.grammar_process import made_of
from twinpool.engine.grammars import Compiler
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest, QueueFull, RequestFailed
from twinpool.request import Grammar, GrammarKind

FINE = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
WRONG = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "thing"}')
ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"allOf": [{"type": "string", "pattern": f"a{i}b"} for i in range(100)]}),
)
"""To find out whether a text matches all of these takes for ever."""
LEVELS = 5000
DEEP = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "$ref": "#/$defs/level0",
            "$defs": {f"level{i}": {"items": {"$ref": f"#/$defs/level{i + 1}"}} for i in range(LEVELS)}
            | {f"level{LEVELS}": {}},
        }
    ),
)
"""What follows these references overflows the stack."""


_OF_OTHERS: set[int] = set()
"""Processes of servers that tests of other files have left."""


def processes() -> list[psutil.Process]:
    """The processes of all checks in this one."""
    return [
        child
        for child in psutil.Process().children()
        if child.pid not in _OF_OTHERS and "twinpool grammars" in child.cmdline()
    ]


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    """Those of all tests; the process is gone when they are closed."""
    _OF_OTHERS.update(child.pid for child in processes())
    made = GrammarChecks(tiny_tokenizer())
    assert processes() == [], "it is started before anybody asks"
    yield made
    made.close()
    assert processes() == []


async def refusal(checks: GrammarChecks, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await checks.checked(Constraint(grammar, "guided_json"))
    assert refused.value.param == "guided_json"
    return refused.value.message


async def test_a_grammar_passes_or_is_refused_with_its_field_and_the_reason(checks: GrammarChecks) -> None:
    assert await checks.checked(Constraint(FINE, "response_format")) == FINE
    assert await refusal(checks, WRONG) == "guided_json cannot be used: Invalid type: thing"
    gbnf = Grammar(GrammarKind.GBNF, 'root ::= "a"')
    plain = await checks.checked(Constraint(gbnf, "guided_grammar"))
    assert (plain.kind, 'start: "a"' in plain.source) == (GrammarKind.LARK, True)
    assert len(processes()) == 1


async def test_one_that_takes_too_much_is_refused_and_the_next_one_passes(checks: GrammarChecks) -> None:
    for grammar, reason in ((DEEP, "nested too deeply"), (ENDLESS, "takes too long")):
        assert reason in await refusal(checks, grammar)
        assert processes() == []
        assert reason in await refusal(checks, grammar)
        assert processes() == [], "it was asked again what it is known to be lost to"
    passing = Grammar(GrammarKind.REGEX, "new")
    assert await checks.checked(Constraint(passing, "guided_regex")) == passing


async def test_a_process_that_somebody_has_ended_is_replaced_for_the_next_grammar(
    checks: GrammarChecks,
) -> None:
    await checks.checked(Constraint(FINE, "guided_json"))
    (process,) = processes()
    process.kill()
    process.wait(10)
    fresh = Grammar(GrammarKind.REGEX, "[a-z]{2,7}")
    assert await checks.checked(Constraint(fresh, "guided_regex")) == fresh


async def test_many_that_come_at_once_are_all_answered(checks: GrammarChecks) -> None:
    several = [Grammar(GrammarKind.REGEX, f"{'(' * (i % 2)}a{i % 7}") for i in range(40)]
    answers = await asyncio.gather(
        *(checks.checked(Constraint(grammar, "guided_regex")) for grammar in several), return_exceptions=True
    )
    for grammar, answer in zip(several, answers, strict=True):
        assert answer == grammar or ("(" in grammar.source and isinstance(answer, InvalidRequest))


async def test_more_than_may_wait_are_told_to_come_again(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 1)
    one, another = Grammar(GrammarKind.REGEX, "one"), Grammar(GrammarKind.REGEX, "another")
    first = asyncio.ensure_future(checks.checked(Constraint(one, "guided_regex")))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="wait to be compiled"):
        await checks.checked(Constraint(another, "guided_regex"))
    assert await first == one
    assert await checks.checked(Constraint(another, "guided_regex")) == another


async def test_one_that_has_waited_for_long_is_told_to_come_again(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checks.checked(Constraint(FINE, "guided_json"))
    (process,) = processes()
    grammar = Grammar(GrammarKind.REGEX, "late")
    monkeypatch.setattr(grammar_checks, "WAIT_LIMIT_S", 0)
    process.suspend()
    try:
        with pytest.raises(QueueFull, match="before this one"):
            await checks.checked(Constraint(grammar, "guided_regex"))
    finally:
        process.resume()
    monkeypatch.undo()
    assert await checks.checked(Constraint(grammar, "guided_regex")) == grammar


async def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes()
    checks = GrammarChecks(tiny_tokenizer())
    monkeypatch.setattr(grammar_checks, "ANSWER_LIMIT_S", 0)
    with pytest.raises(RequestFailed, match="does not run"):
        await checks.checked(Constraint(FINE, "guided_json"))
    assert processes() == before
    checks.close()


async def test_a_client_that_leaves_takes_nothing_from_others(checks: GrammarChecks) -> None:
    left, stays = Grammar(GrammarKind.REGEX, "left("), Grammar(GrammarKind.REGEX, "stays")
    leaving = asyncio.ensure_future(checks.checked(Constraint(left, "guided_regex")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await checks.checked(Constraint(stays, "guided_regex")) == stays
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await checks.checked(Constraint(left, "guided_regex"))
    assert leaving.cancelled()


async def test_whoever_drops_them_ends_their_process() -> None:
    before = processes()
    checks = GrammarChecks(tiny_tokenizer())
    await checks.checked(Constraint(FINE, "guided_json"))
    assert len(processes()) == len(before) + 1
    del checks
    wait_for("the process ends", lambda: not gc.collect() and processes() == before)


async def test_the_process_reads_the_models_own_file(tmp_path: Path) -> None:
    """As it is there: a tokenizer that cuts its texts, or fills them up, does not do so in a grammar."""
    tiny = tiny_tokenizer()
    file = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_str(tiny.backend.to_str())
    backend.enable_truncation(1)
    backend.enable_padding(length=9)
    backend.save(str(file))
    checks = GrammarChecks(Tokenizer(tiny.backend, tiny.eos_token_ids, None, file=file))
    assert await checks.checked(Constraint(FINE, "guided_json")) == FINE
    checks.close()
    made = made_of({"file": str(file), "num_tokens": tiny.vocab_size, "eos_token_ids": tiny.eos_token_ids})
    own = Compiler(tiny.backend.to_str(), tiny.vocab_size, tiny.eos_token_ids)
    spelt = Grammar(GrammarKind.REGEX, "the quick brown fox")
    assert made.compile(spelt).mask().tolist() == own.compile(spelt).mask().tolist()


async def test_a_file_that_is_gone_since_the_start_is_named(tmp_path: Path) -> None:
    tiny = tiny_tokenizer()
    checks = GrammarChecks(Tokenizer(tiny.backend, tiny.eos_token_ids, None, file=tmp_path / "gone.json"))
    assert "gone.json cannot be read any more" in await refusal(checks, FINE)
    checks.close()


def test_a_tokenizer_knows_the_file_that_it_was_read_from() -> None:
    assert tiny_tokenizer().file is None
    model = default_model_dir()
    assert Tokenizer.from_dir(model).file == (model / "tokenizer.json").resolve()


async def test_a_model_without_an_end_is_told_of_each_time_and_started_for_once() -> None:
    checks = GrammarChecks(Tokenizer(byte_level(), (), None))
    for _ in range(2):
        assert "no token that ends an answer" in await refusal(checks, FINE)
    checks.close()


async def test_a_process_that_cannot_run_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "_PROCESS", "twinpool.no_such_module")
    checks = GrammarChecks(tiny_tokenizer())
    for _ in range(2):
        with pytest.raises(RequestFailed, match="does not run"):
            await checks.checked(Constraint(FINE, "guided_json"))
    checks.close()
