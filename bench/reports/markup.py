"""Elements of HTML and SVG that escape what they are given: only what was made here is taken for markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "str | Markup | Iterable[Child] | None"
"""None is nothing."""
_VOID = frozenset({"meta", "br", "hr"})


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """An element. Attribute names have - for _, a trailing _ is left out (`class_`), and those of None too."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{_inside(children)}</{name}>")


def text_of(*children: Child) -> Markup:
    """Children side by side, without an element around them."""
    return Markup(_inside(children))


def _inside(children: Iterable[Child]) -> str:
    return "".join(
        child if isinstance(child, Markup) else escape(child) if isinstance(child, str) else _inside(child)
        for child in children
        if child is not None
    )


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
