"""Whatever tokens of those that its schema allows an answer is made of: it ends, and is JSON that the schema describes.

On the default model's own tokenizer. The schemas describe finite languages, so that every walk ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.default_model import default_model_dir
from support.jobs import job

from twinpool.engine.grammars import Grammars, Matcher
from twinpool.engine.tokenizer import Tokenizer
from twinpool.request import Grammar, GrammarKind

Schema = Mapping[str, Any]
MOST_TOKENS = 20_000
NAMES = st.text('abcé "\\/\n', min_size=1, max_size=4)
VALUES = st.none() | st.booleans() | st.integers(-999, 999) | st.text('xyé"\\\n', max_size=5)


@st.composite
def integers(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(-2000, 2000))
    return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 3000))}


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    shortest = draw(st.integers(0, 4))
    return {"type": "string", "minLength": shortest, "maxLength": shortest + draw(st.integers(0, 6))}


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    fewest = draw(st.integers(0, 2))
    most = fewest + draw(st.integers(0, 2))
    return {"type": "array", "items": draw(items), "minItems": fewest, "maxItems": most}


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(NAMES, values, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


LEAVES = st.one_of(
    integers(),
    strings(),
    st.sampled_from(({"type": "boolean"}, {"type": "null"})),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        arrays(inner), objects(inner), st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    """Equality of JSON values: true is not 1."""
    return type(one) is type(other) and one == other


def is_valid(value: object, schema: Schema) -> bool:
    """Whether `value` is what a schema of the kinds above describes."""
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    if "const" in schema:
        return same(value, schema["const"])
    if "enum" in schema:
        return any(same(value, one) for one in schema["enum"])
    match schema["type"], value:
        case ("null", None):
            return True
        case ("boolean", bool()):
            return True
        case ("integer", int()) if not isinstance(value, bool):
            return bool(schema["minimum"] <= value <= schema["maximum"])
        case ("string", str()):
            return bool(schema["minLength"] <= len(value) <= schema["maxLength"])
        case ("array", list()):
            fits = schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(item, schema["items"]) for item in value)
        case ("object", dict()):
            known = schema["properties"]
            return (
                set(schema["required"]) <= value.keys() <= known.keys()
                and all(is_valid(item, known[name]) for name, item in value.items())
            )  # fmt: skip
    return False


@cache
def model() -> tuple[Tokenizer, Grammars]:
    directory = default_model_dir()
    tokenizer = Tokenizer.from_dir(directory)
    return tokenizer, Grammars.of_model(directory, tokenizer.vocab_size)


def allowed(matcher: Matcher) -> np.ndarray[Any, np.dtype[np.intp]]:
    mask = matcher.mask()
    assert not matcher.error
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@settings(max_examples=40, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_any_walk_through_the_allowed_tokens_ends_in_valid_json(schema: Schema, seed: int) -> None:
    choice = random.Random(seed)
    tokenizer, grammars = model()
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    work = job("a", 3, grammar=grammar)
    matcher, tokens = grammars.matcher(work), list[int]()
    while (token := int(choice.choice(allowed(matcher)))) not in tokenizer.eos_token_ids:
        tokens.append(token)
        matcher.accept(token)
        assert len(tokens) < MOST_TOKENS
    matcher.accept(token)
    assert matcher.is_stopped
    assert not matcher.error
    text = tokenizer.decode(tokens)
    assert is_valid(json.loads(text), schema), text
    seam = choice.randrange(len(tokens) + 1)
    seen, resumed = grammars.matcher(work), grammars.matcher(work)
    for token in tokens[:seam]:
        allowed(seen)
        seen.accept(token)
        resumed.accept(token)
    assert (resumed.mask() == seen.mask()).all(), "one that resumes here goes on differently"
