"""Pieces of grammars in llguidance's dialect of Lark, as text: nothing is parsed or compiled here.

A grammar is lines of `name: expression`, of which `start` is the first to match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

WHITESPACE = r" |\r?\n[ \t]{0,64}"
"""What may stand between two parts of JSON, if anything does: a space, or a new line with its indentation. Bounded,
because a model that may go on with white space for ever sometimes does."""
_OPTIONS = "x-guidance"


def literal(text: str) -> str:
    """The expression that matches exactly `text`, in whatever tokens."""
    return json.dumps(text)


def one_of(texts: Iterable[str]) -> str:
    """The expression that matches exactly one of `texts`."""
    return " | ".join(map(literal, texts))


def token(token_id: int) -> str:
    """The expression that matches this one token: for those with a meaning of their own, which no text matches."""
    return f"<[{token_id}]>"


def json_value(schema: Mapping[str, Any]) -> str:
    """The expression that matches JSON which is valid by `schema`."""
    return f"%json {json.dumps(bounded(schema))}"


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, compiled with `WHITESPACE` whatever it says of it."""
    given = schema.get(_OPTIONS)
    options = given if isinstance(given, dict) else {}
    return {**schema, _OPTIONS: {**options, "whitespace_pattern": WHITESPACE}}
