"""Errors and warnings of a chat request that another route's request was turned into, in that route's own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from twinpool.coordinator.gateway.foreign_fields import ForeignField
from twinpool.errors import RequestError


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What fields of the chat request are called on another route, where that differs.

    `fields` are whole fields; inside of them the other request may look different, so an error's `param` is just the
    field. `parts` are parts of paths and of messages: words that mean nothing else.
    """

    fields: Mapping[str, str]
    parts: Mapping[str, str]

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """RequestErrors that leave the block name fields as this route does; a ForeignField does so already."""
        try:
            yield
        except ForeignField:
            raise
        except RequestError as error:
            error.message = self.said(error.message)
            error.args = (error.message,)
            error.param = None if error.param is None else self._renamed(error.param)
            raise

    def said(self, text: str) -> str:
        """A message, or a path, in this route's words."""
        for part, own in self.parts.items():
            text = text.replace(part, own)
        return text

    def _renamed(self, param: str) -> str:
        for field, own in self.fields.items():
            if param.startswith(field) and not param[len(field) : len(field) + 1].isidentifier():
                return own
        return self.said(param)
