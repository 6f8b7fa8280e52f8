"""Messages that are well-formed and make no sense, and bytes that nearly are messages; for hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec.inspect as look
from hypothesis import strategies as st

from twinpool.messages import PROTOCOL_VERSION, AnyMessage, Message, encode

MOST_ITEMS = 3
FEW = 5
"""Half of all numbers are below it, so that they meet those of real requests now and then."""

LIKELY: Mapping[str, Sequence[Any]] = {
    "worker_id": ("prefill-0", "decode-0"),
    "decode_worker": ("decode-0", "prefill-0"),
    "prefill_worker": ("prefill-0", "decode-0"),
    "incarnation": ("life-1", "life-2"),
    "decode_incarnation": ("life-1", "life-2"),
    "prefill_incarnation": ("life-1", "life-2"),
    "request_id": ("r0", "r1"),
    "num_cached_blocks": (0, 1),
    "num_emitted": (0, 1),
    "max_tokens": (2, 4),
    "min_tokens": (0,),
    "version": (1,),
    "protocol": (PROTOCOL_VERSION,),
}
"""Values by field that real requests and workers have too."""
MENDED: Mapping[str, Any] = {"num_cached_blocks": 0, "num_emitted": 0, "token_ids": (1,)}
"""What makes a message fit together whose fields contradict each other."""


@cache
def messages(*kinds: type[Message]) -> st.SearchStrategy[Message]:
    """Any message that decoding lets through, or any of `kinds`."""
    types = look.multi_type_info(kinds) if kinds else _members(look.type_info(AnyMessage))
    return st.one_of([_values(kind) for kind in types])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The bytes of a message with a few of them changed, left out, put in or cut off."""
    data = bytearray(encode(draw(messages())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        rest = draw(st.integers(0, 3))
        data[at : at + rest] = draw(st.binary(max_size=4))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def _members(kind: look.Type) -> Sequence[look.Type]:
    return kind.types if isinstance(kind, look.UnionType) else (kind,)


def _values(kind: look.Type, field: str = "") -> st.SearchStrategy[Any]:
    plain = _plain(kind)
    return st.sampled_from(LIKELY[field]) | plain if field in LIKELY else plain


def _plain(kind: look.Type) -> st.SearchStrategy[Any]:
    match kind:
        case look.StructType() | look.DataclassType():
            return _built(kind.cls, {f.name: _values(f.type, f.name) for f in kind.fields})
        case look.NamedTupleType():
            return _built(kind.cls, {f.name: _values(f.type, f.name) for f in kind.fields})
        case look.IntType(ge=least, le=most):
            least, most = least or 0, 2**64 - 1 if most is None else most
            return st.integers(least, min(most, least + FEW)) | st.integers(least, most)
        case look.FloatType(gt=None, ge=least, le=most):
            return st.floats(least, most)
        case look.FloatType(gt=beyond, le=most):
            return st.floats(beyond, most, exclude_min=True)
        case look.StrType(pattern=None, max_length=most):
            texts = ("" if not kind.min_length else "-", "r0", "\0 or 'é'\n\U0001f600", "x" * (most or 0))
            return st.integers(0, len(texts) - 1).map(texts.__getitem__)
        case look.StrType():
            return st.sampled_from(("prefill-0", "decode-0", "ghost", "a" * 64))
        case look.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=64)
        case look.VarTupleType(item_type=item):
            return st.lists(_values(item), min_size=kind.min_length or 0, max_size=MOST_ITEMS).map(tuple)
        case look.TupleType(item_types=items):
            return st.tuples(*map(_values, items))
        case look.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=MOST_ITEMS)
        case look.EnumType(cls=members):
            return st.sampled_from(list(members))
        case look.BoolType():
            return st.booleans()
        case look.NoneType():
            return st.none()
        case look.UnionType(types=types):
            return st.one_of([_values(member) for member in types])
        case _:
            raise AssertionError(f"no junk for {kind}")


def _built(kind: type[Any], fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    def build(values: dict[str, Any]) -> Any:
        try:
            return kind(**values)
        except ValueError:  # decoding would refuse it
            return kind(**values | {name: MENDED[name] for name in MENDED if name in values})

    return st.fixed_dictionaries(fields).map(build)
