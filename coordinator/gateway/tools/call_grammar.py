"""Pieces of grammars for answers that must call tools, in llguidance's dialect of Lark.

A call's arguments follow the function's own schema, each a `%json` of its own, so that references within a schema stay
what they are. Space is as Python's `json.dumps` has it, which is what chat templates show models: a model that may
choose can go on with space for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinpool.coordinator.gateway.tools.fields import FunctionDefinition
from twinpool.engine import lark

_NO_PARAMETERS: Mapping[str, Any] = {"properties": {}}
_SAY_MORE = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
"""What may allow an object properties that are not among its `properties`."""
_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def mark_expression(text: str, added_token_ids: Mapping[str, int]) -> str:
    """A mark: as the token that the vocabulary has for it, else as text. A token that is written as text would be
    spelled out in others, in which the model has never seen it."""
    token_id = added_token_ids.get(text)
    return lark.literal(text) if token_id is None else lark.token(token_id)


def either(alternatives: Iterable[str]) -> str:
    """One of them."""
    return " | ".join(alternatives)


def objects(functions: Sequence[FunctionDefinition], arguments: str) -> str:
    """The object of a call of one of `functions`, whose arguments are under that key."""
    beginnings = [lark.literal(f'{{"name": "{function.name}", "{arguments}": ') for function in functions]
    end = lark.literal("}")
    return either(f"{beginning} {_name(number)} {end}" for number, beginning in enumerate(beginnings))


def arguments_of(functions: Sequence[FunctionDefinition]) -> str:
    """The rules `args_0`, `args_1`, …: the arguments of each function."""
    return "".join(
        f"{_name(number)}: %json {json.dumps(_schema(function))}\n"
        for number, function in enumerate(functions)
    )


def _name(number: int) -> str:
    return f"args_{number}"


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    # A function takes what it names, though a schema that says nothing of other properties allows them.
    is_closed = "properties" in parameters and not _SAY_MORE & parameters.keys()
    others = {"additionalProperties": False} if is_closed else {}
    # What llguidance cannot hold a model to is an error only if the function wants it to be held to all.
    guidance = {**_SPACE, "lenient": not function.strict}
    return {**parameters, "type": "object", **others, "x-guidance": guidance}
