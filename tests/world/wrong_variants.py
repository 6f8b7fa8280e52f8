"""Deliberately wrong variants of the real cores: the world must find every one of them.

Each is a function that patches one thing; its docstring says what is wrong then.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

MAX_SEEDS = 1000
"""Each is found in these, the first ones; the suite runs them with the right cores."""
Variant = Callable[[pytest.MonkeyPatch], None]


class Catalogue(list[Variant]):
    """Variants, in the order in which they are written."""

    def add(self, patch: Variant) -> Variant:
        """Puts it on the list."""
        self.append(patch)
        return patch
