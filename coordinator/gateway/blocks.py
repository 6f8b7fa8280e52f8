"""An answer as blocks that follow each other: text, reasoning, calls of tools. Deltas in, blocks and bytes out.

Chat completions have one message with fields; the newer routes have a list of blocks, each with a beginning and an end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO

from twinpool.coordinator.gateway.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallBegin
from twinpool.errors import InvariantViolation


class BlockKind(Enum):
    """What a block says."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block of an answer, the `index`-th. `call_id` and `name` are a call's."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    is_cut: bool = False
    """Whether the answer had to end before the block did."""
    _text: StringIO = field(default_factory=StringIO)

    @property
    def text(self) -> str:
        """All of it so far: content, reasoning, or the JSON text of a call's arguments."""
        return self._text.getvalue()

    def append(self, text: str) -> None:
        """Adds the next part of the text."""
        self._text.write(text)


class BlockWriter(ABC):
    """Sorts the deltas of one answer into `blocks`, and writes what a stream says of each."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def add(self, deltas: Iterable[Delta]) -> bytes:
        """The events of the next deltas. Raises InvariantViolation if a call's arguments come outside of it."""
        written = []
        for delta in deltas:
            match delta:
                case Content(text):
                    written.append(self._continue(BlockKind.TEXT, text))
                case Reasoning(text):
                    written.append(self._continue(BlockKind.REASONING, text))
                case ToolCallBegin(_, call_id, name):
                    written.append(self.begin(BlockKind.CALL, call_id, name))
                case ToolCallArguments(index, text):
                    if self._open is None or self._open.kind is not BlockKind.CALL:
                        raise InvariantViolation(f"arguments of tool call {index} come outside of it")
                    written.append(self._append(self._open, text))
        return b"".join(written)

    def begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> bytes:
        """The events of a new block, and of the end of the one before."""
        ended = self.end()
        self._open = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(self._open)
        return ended + self._begun(self._open)

    def end(self, *, is_cut: bool = False) -> bytes:
        """The events of the end of the block that is open, if one is. `is_cut`: the answer may have no more tokens."""
        block, self._open = self._open, None
        if block is None:
            return b""
        block.is_cut = is_cut
        return self._ended(block)

    @property
    def num_calls(self) -> int:
        """Calls of tools so far."""
        return sum(block.kind is BlockKind.CALL for block in self.blocks)

    def _continue(self, kind: BlockKind, text: str) -> bytes:
        begun = b"" if self._open is not None and self._open.kind is kind else self.begin(kind)
        assert self._open is not None, "a block was just begun"
        return begun + self._append(self._open, text)

    def _append(self, block: Block, text: str) -> bytes:
        block.append(text)
        return self._more(block, text)

    def num_reasoning(self, num_tokens: int) -> int:
        """How many of the answer's `num_tokens` tokens are reasoning, about: by its share of the characters."""
        total = sum(len(block.text) for block in self.blocks)
        reasoning = sum(len(block.text) for block in self.blocks if block.kind is BlockKind.REASONING)
        return round(num_tokens * reasoning / total) if total else 0

    @abstractmethod
    def _begun(self, block: Block) -> bytes: ...

    @abstractmethod
    def _more(self, block: Block, text: str) -> bytes: ...

    @abstractmethod
    def _ended(self, block: Block) -> bytes: ...
