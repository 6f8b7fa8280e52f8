"""Why a body is refused: one sentence that says the field, its value and what to change."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from twinpool.errors import InvalidRequest

PRIVATE_FIELDS = frozenset(
    {
        "prompt",
        "messages",
        "input",
        "instructions",
        "system",
        "text",
        "suffix",
        "prediction",
        "documents",
        "tools",
        "functions",
        "chat_template",
        "prompt_embeds",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "regex",
        "ebnf",
        "json_schema",
    }
)
"""Fields that carry what only client and model are to know."""

_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}


def shown(value: object) -> str:
    """A value of the body as an error message quotes it: JSON, at most 80 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown_of(field: str, value: object) -> str:
    """The value of `field` as an error message may quote it: messages get logged, and prompts must not be."""
    root = _STEP.split(f".{field}", maxsplit=1)[1]
    return kind_of(value) if root in PRIVATE_FIELDS else shown(value)


def kind_of(value: object) -> str:
    """What a value is, without what it says; numbers, true, false and null as they are."""
    match value:
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return shown(value)


def sentence(error: str, raw: dict[str, Any]) -> InvalidRequest:
    """msgspec's "Expected `int | null`, got `str` - at `$.seed`", in plain words and with the value."""
    found = _WRONG.fullmatch(error)
    what, path = (found["what"], found["path"] or "") if found else (error, "")
    if what.startswith("Object missing required field"):
        field = f"{path}.{what.split('`')[1]}".lstrip(".")
        return InvalidRequest(f"{field} is missing; the request needs it", param=field)
    # Behind `[...]` it is a value of an object, of which msgspec does not say which.
    path, is_inside, _ = path.partition("[...]")
    value: Any = raw
    for step in _STEP.finditer(path):
        value = value[int(step["index"])] if step["index"] else value[step["key"]]
    field = path.lstrip(".")
    expected = (
        what.removeprefix("Expected ").split(", got ")[0].replace("Number out of range", "a smaller number")
    )
    for types in re.findall(r"`([^`]*)`", expected):
        names = [_TYPE_NAMES.get(name, name) for name in types.split(" | ") if name != "null"]
        expected = expected.replace(f"`{types}`", " or ".join(names))
    subject = "each of its values" if is_inside else "it"
    return InvalidRequest(f"{field} is {shown_of(field, value)}; {subject} must be {expected}", param=field)
