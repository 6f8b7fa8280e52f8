"""Structured output: what a request wants its answer's text to match, from the fields that say so.

`response_format` is OpenAI's, `structured_outputs` vLLM's, the `guided_` fields are vLLM's older ones, and `regex`,
`ebnf` and `json_schema` are SGLang's. A `Constraint` is not known to make sense yet: `GrammarChecks.checked` compiles
it and gives the `Grammar` for `SamplingParams`. All of it is the client's own text: see `body_errors.PRIVATE_FIELDS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from twinpool.bounds import MOST_GRAMMAR_CHARS
from twinpool.engine import lark
from twinpool.errors import InvalidRequest
from twinpool.request import Grammar, GrammarKind

RESPONSE_FORMATS = ("text", "json_object", "json_schema")
MAX_CHOICE_TEXTS = 4096
_Reader = Callable[[Any, str], Grammar]
"""From a field's value and its name."""
_Choices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class JsonSchema(msgspec.Struct, frozen=True):
    """A JSON schema with a name. Answers obey it with or without `strict`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What an answer is to be: any text, any JSON object, or JSON that is valid by a schema. `schema` is where
    other servers look for that one, and refused."""

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*RESPONSE_FORMATS]})]
    json_schema: JsonSchema | None = None
    schema: Any = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """What an answer must match: exactly one of `json` (a schema, or one as text), `regex`, `choice`, `grammar` (GBNF
    or Lark) and `json_object`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class StructuredBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body that constrain its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None


class Constraint(NamedTuple):
    """A grammar that a client wants its answer to match, and the `field` that says so."""

    grammar: Grammar
    field: str


def constraint_of(body: StructuredBody, *, ignore_eos: bool, min_tokens: int) -> Constraint | None:
    """What the body constrains its answer to, if anything.

    Raises:
        InvalidRequest: more than one field does, or one in a way that is not supported, or beside others that say that
            the answer must not end where it is complete.
    """
    found = [*_of_response_format(body.response_format), *_of_structured_outputs(body.structured_outputs)]
    others: tuple[tuple[str, Any, _Reader], ...] = (
        ("guided_json", body.guided_json, _of_schema),
        ("guided_regex", body.guided_regex, _of_regex),
        ("guided_choice", body.guided_choice, _of_choice),
        ("guided_grammar", body.guided_grammar, _of_grammar),
        ("regex", body.regex, _of_regex),
        ("ebnf", body.ebnf, _of_grammar),
        ("json_schema", body.json_schema, _of_schema),
    )
    found += [Constraint(read(value, field), field) for field, value, read in others if value is not None]
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise InvalidRequest(
            f"{first} and {second} both constrain the answer; send one of them", param=second
        )
    (constraint,) = found
    refuse_contradictions(constraint.field, ignore_eos=ignore_eos, min_tokens=min_tokens)
    refuse_too_long(*constraint)
    return constraint


def refuse_contradictions(field: str, *, ignore_eos: bool, min_tokens: int) -> None:
    """Raises InvalidRequest if the answer is to go on where what `field` asks for is complete."""
    if ignore_eos:
        message = f"ignore_eos is true, but {field} says where the answer ends; leave out one of them"
        raise InvalidRequest(message, param="ignore_eos")
    if min_tokens > 0:
        message = f"min_tokens is {min_tokens}, but {field} says where the answer ends; leave out one of them"
        raise InvalidRequest(message, param="min_tokens")


def refuse_too_long(grammar: Grammar, field: str) -> None:
    """Raises InvalidRequest if no message to a worker has room for what `field` asks for."""
    if (length := len(grammar.source)) > MOST_GRAMMAR_CHARS:
        message = f"{field} is {length} characters long as a grammar; send at most {MOST_GRAMMAR_CHARS}"
        raise InvalidRequest(message, param=field)


def _of_response_format(wanted: ResponseFormat | None) -> list[Constraint]:
    if wanted is None:
        return []
    if wanted.schema is not None:
        field = "response_format.schema"
        raise InvalidRequest(
            f"{field} is not a field of this route; a schema goes with the type json_schema, as "
            "response_format.json_schema.schema",
            param=field,
        )
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Constraint(_of_schema(_ANY_OBJECT, "response_format"), "response_format")]
    if wanted.type != "json_schema":
        field, allowed = "response_format.type", ", ".join(RESPONSE_FORMATS)
        message = f"{field} is {json.dumps(wanted.type)[:80]}, which is not supported; use one of {allowed}"
        raise InvalidRequest(message, param=field)
    field = "response_format.json_schema"
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        missing = field if wanted.json_schema is None else f"{field}.schema"
        raise InvalidRequest(f"{missing} is missing; the type json_schema needs it", param=missing)
    return [Constraint(_of_schema(wanted.json_schema.schema, f"{field}.schema"), f"{field}.schema")]


def _of_structured_outputs(wanted: StructuredOutputs | None) -> list[Constraint]:
    if wanted is None:
        return []
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(wanted, name) is not None:
            raise InvalidRequest(
                f"structured_outputs.{name} is not supported; leave it out",
                param=f"structured_outputs.{name}",
            )
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(wanted, name):
            field = f"structured_outputs.{name}"
            message = f"{field} is true, which is not supported; leave it out or set it to false"
            raise InvalidRequest(message, param=field)
    kinds: tuple[tuple[str, Any, _Reader], ...] = (
        ("json", wanted.json, _of_schema),
        ("regex", wanted.regex, _of_regex),
        ("choice", wanted.choice, _of_choice),
        ("grammar", wanted.grammar, _of_grammar),
        ("json_object", _ANY_OBJECT if wanted.json_object else None, _of_schema),
    )
    fields = [(f"structured_outputs.{name}", value, read) for name, value, read in kinds if value is not None]
    if not fields:
        field, names = "structured_outputs", ", ".join(name for name, _, _ in kinds)
        raise InvalidRequest(
            f"{field} asks for nothing; give it one of {names}, or leave it out", param=field
        )
    return [Constraint(read(value, field), field) for field, value, read in fields]


def _of_schema(value: str | Mapping[str, Any], field: str) -> Grammar:
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise InvalidRequest(f"{field} is a text that is no JSON: {exc}", param=field) from exc
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{field} is no JSON schema; it must be an object", param=field)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _of_regex(value: str, field: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, _not_empty(value, field))


def _of_choice(value: list[str], field: str) -> Grammar:
    del field
    # A terminal of its own: of what a rule may be at one place, the parser follows 2,000 at most.
    return Grammar(GrammarKind.LARK, f"start: CHOICE\nCHOICE: {lark.one_of(value)}")


def _of_grammar(value: str, field: str) -> Grammar:
    kind = GrammarKind.GBNF if _GBNF_RULE.search(value) else GrammarKind.LARK
    return Grammar(kind, _not_empty(value, field))


def _not_empty(value: str, field: str) -> str:
    if not value.strip():
        raise InvalidRequest(f"{field} is empty; leave it out", param=field)
    return value
