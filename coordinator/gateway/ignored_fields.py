"""Fields that nothing is done with: found at any depth of a body, and told of in a header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

WARNING_HEADER = "x-twinpool-warning"
MAX_WARNING_CHARS = 512
MAX_NAMES = 16
MAX_NAME_CHARS = 64
"""Of fields that nobody has heard of: so many are told of, and of a long name the beginning."""


@dataclass(slots=True)
class _Known:
    """The names that an object may have, and what is known of objects, and of lists of them, below them."""

    names: frozenset[str]
    inner: dict[str, _Known] = field(default_factory=dict)


def warnings_of(
    raw: Mapping[str, Any], kind: type[msgspec.Struct], without_effect: Iterable[str] = ()
) -> tuple[str, ...]:
    """What the client that sent the body `raw` is told: which fields a `kind` has never heard of, by their paths, and
    those that are `without_effect`.

    What `kind` and the structs in it refuse (`not_supported`, `foreign`) and what they pass over in silence
    (`passed_over`) is known.
    """
    ignored = [*islice(_unknown(raw, _known(kind), ""), MAX_NAMES), *without_effect]
    return (f"ignored fields: {', '.join(ignored)}",) if ignored else ()


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """The warnings as a header can have them: printable ASCII, and not for ever. Without any there is no header."""
    if not warnings:
        return {}
    text = re.sub(r"[^ -~]", "?", "; ".join(warnings))
    return {WARNING_HEADER: text if len(text) <= MAX_WARNING_CHARS else f"{text[: MAX_WARNING_CHARS - 3]}..."}


def _unknown(raw: Mapping[str, Any], known: _Known, path: str) -> Iterator[str]:
    """The paths of all fields of `raw`, which is at `path`, that are not known and not null."""
    if not raw.keys() <= known.names:
        for name in raw:
            if name not in known.names and raw[name] is not None:
                yield f"{path}{name}"[:MAX_NAME_CHARS]
    for name, inner in known.inner.items():
        value = raw.get(name)
        if type(value) is dict:
            yield from _unknown(value, inner, f"{path}{name}.")
        elif type(value) is list:
            for index, item in enumerate(value):
                if type(item) is dict and (inner.inner or not item.keys() <= inner.names):
                    yield from _unknown(item, inner, f"{path}{name}[{index}].")


@cache
def _known(kind: type[msgspec.Struct]) -> _Known:
    return _known_of(kind, {})


def _known_of(kind: type[msgspec.Struct], found: dict[type, _Known]) -> _Known:
    """What is known of `kind`, which may be part of itself: `found` has those that are being looked at."""
    if kind in found:
        return found[kind]
    further = [
        name for table in ("not_supported", "foreign", "passed_over") for name in getattr(kind, table, ())
    ]
    known = found[kind] = _Known(frozenset({*kind.__struct_encode_fields__, *further}))
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType), "a struct is one"
    for own in described.fields:
        for inner in _structs(own.type):
            known.inner[own.encode_name] = _known_of(inner, found)
    return known


def _structs(described: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The struct that a value of this type is, or is a list of; of the types of a union at most one has one."""
    match described:
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            yield from _structs(inner)
        case inspect.UnionType(types=types):
            for inner in types:
                yield from _structs(inner)
        case inspect.StructType(cls=kind):
            yield kind
