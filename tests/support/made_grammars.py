"""Grammars of every kind over a small tokenizer, and what they let through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import numpy as np

from support.gateway import tiny_tokenizer
from support.jobs import job
from twinpool.engine.grammars import Compiler, Matcher
from twinpool.request import Grammar, GrammarKind, Job

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


def with_grammar(grammar: Grammar, name: str = "a") -> Job:
    return job(name, 3, grammar=grammar)
