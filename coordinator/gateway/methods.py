"""Which methods a path has."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

OPTIONS = "OPTIONS"


def methods_of(routes: Iterable[BaseRoute], scope: Scope) -> tuple[str, ...]:
    """The methods of the path that `scope` asks for, in order, OPTIONS among them; none if no route has that path."""
    found = {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return tuple(sorted({*found, OPTIONS})) if found else ()
