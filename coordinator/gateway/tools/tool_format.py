"""How a family of models writes calls of tools: a parser that reads them, and a grammar of nothing else."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from twinpool.coordinator.gateway.tools.call_parser import CallParser
from twinpool.coordinator.gateway.tools.fields import FunctionDefinition

OF_IDS = string.ascii_letters + string.digits
"""What ids of calls are made of."""


def random_id(num_chars: int) -> str:
    """So many letters and digits that nobody can guess."""
    return "".join(secrets.choice(OF_IDS) for _ in range(num_chars))


class ToolFormat(ABC):
    """One format, for a model whose vocabulary has `added_token_ids`, by their texts.

    `marks` are texts that the parser needs to see: where they are special tokens, an answer's text must not leave them
    out.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, added_token_ids: Mapping[str, int]) -> None:
        self._added_token_ids = added_token_ids

    @abstractmethod
    def parser(self, tool_names: Collection[str], most_calls: int | None) -> CallParser:
        """The parser of one answer that may call `tool_names`; calls beyond `most_calls` are left out."""

    @abstractmethod
    def grammar(self, functions: Sequence[FunctionDefinition], *, is_single: bool) -> str:
        """Lark, from `start`: calls of `functions`, at least one (with `is_single` one), and nothing else."""

    def make_id(self) -> str:
        """An id for a call."""
        return f"call_{random_id(24)}"

    def id_for_template(self, call_id: str) -> str:
        """The id of an earlier call as the chat template takes it."""
        return call_id
