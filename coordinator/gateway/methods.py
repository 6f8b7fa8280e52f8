"""Which methods a path has."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

OPTIONS = "OPTIONS"


def methods_of(routes: Iterable[BaseRoute], scope: Scope) -> tuple[str, ...]:
    """The methods of the path that `scope` asks for, in order, OPTIONS among them; none if no route has that path.

    Routes with exactly that path count alone, if there are any: not those of which it fills in a parameter.
    """
    of_path = [r for r in routes if isinstance(r, Route) and r.matches(scope)[0] is not Match.NONE]
    exact = [route for route in of_path if not route.param_convertors]
    found = {method for route in exact or of_path for method in route.methods or ()}
    return tuple(sorted({*found, OPTIONS})) if found else ()
