"""What a step reads, in one piece of pinned host memory and one of the device's: one copy brings it over.

Where the numbers stand is a pure function of how many there are (`Room`), and so are the numbers of the slices: numpy
alone, so that a CPU tests what a GPU runs. A `StepInputs` that is kept and filled again serves a captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.kernels.batch_sampling import ROW
from twinpool.kernels.gpu.batch import DeviceBatch
from twinpool.kernels.paged_attention import PagedBatch

NOWHERE = -1
"""The slot of a row that is padding: its keys and values are not written."""

_ALIGNED = 128
"""Every array begins at a multiple of so many bytes, as one of torch's own does: Triton compiles a kernel anew for an
address of another alignment, and no length of a prompt should cost that while others wait."""

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


@dataclass(frozen=True, slots=True)
class Room:
    """How many packed tokens, sequences, blocks of a sequence, and rows to go on with, the inputs of a step hold; and
    for how many of the rows they say how to sample."""

    num_tokens: int
    num_seqs: int
    most_blocks: int
    num_rows: int
    num_sampled: int = 0

    def sections(self) -> dict[str, tuple[type[np.signedinteger[Any]], tuple[int, ...]]]:
        """Element type and shape of each array, in their order in memory: the wider ones first, so all are aligned; the
        block tables last, because they seldom change."""
        return {
            "token_ids": (np.int64, (self.num_tokens,)),
            "positions": (np.int64, (self.num_tokens,)),
            "slots": (np.int64, (self.num_tokens,)),
            "rows": (np.int64, (self.num_rows,)),
            "query_starts": (np.int32, (self.num_seqs + 1,)),
            "ends": (np.int32, (self.num_seqs,)),
            "sampling": (np.int32, (self.num_sampled, ROW.itemsize // 4)),
            "block_tables": (np.int32, (self.num_seqs, self.most_blocks)),
        }


class StepInputs:
    """The inputs of one step, or of one after the other, each filled in after the one before has run.

    `token_ids`, `rows` and `batch` are what `Model.forward` takes, `sampling` what the sampler's kernels take. They
    look into the device's memory and stay the same from step to step, so a graph that has read them once reads what the
    next `fill` puts there.
    """

    def __init__(
        self, room: Room, block_size: int, device: torch.device, *, num_decodes: int, most_queries: int
    ):
        """`num_decodes` and `most_queries` as in `DeviceBatch`. There is nothing in it before `fill` or `pad`."""
        self.room = room
        self._block_size = block_size
        sections = room.sections()
        sizes = [np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in sections.values()]
        *starts, num_bytes = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables_at = starts[-1]
        bytes_of = self._host.numpy()
        arrays: dict[str, Ints] = {}
        tensors: dict[str, torch.Tensor] = {}
        for (name, (dtype, shape)), start, size in zip(sections.items(), starts, sizes, strict=True):
            arrays[name] = bytes_of[start : start + size].view(dtype).reshape(shape)
            torch_type = torch.int64 if dtype is np.int64 else torch.int32
            tensors[name] = self._device[start : start + size].view(torch_type).view(shape)
        self._arrays = arrays
        self._tables: list[tuple[int, ...]] = [()] * room.num_seqs
        self._tables_changed = True
        self.token_ids, self.rows = tensors["token_ids"], tensors["rows"]
        self.sampling = tensors["sampling"]
        self.batch = PagedBatch(
            query_starts=np.zeros(room.num_seqs + 1, np.int64),
            ends=np.zeros(room.num_seqs, np.int64),
            block_tables=np.empty(0, np.int64),
            table_starts=np.zeros(room.num_seqs + 1, np.int64),
            slots=tensors["slots"],
            positions=tensors["positions"],
            on_device=DeviceBatch(
                tensors["query_starts"], tensors["ends"], tensors["block_tables"], num_decodes, most_queries
            ),
        )

    @classmethod
    def of(
        cls, slices: Sequence[SequenceSlice], rows: Ints, block_size: int, device: torch.device
    ) -> StepInputs:
        """Inputs for exactly these slices and packed rows, on their way to the device."""
        lengths = [len(piece.token_ids) for piece in slices]
        num_decodes = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
        most_blocks = max(len(piece.block_table) for piece in slices)
        room = Room(sum(lengths), len(slices), most_blocks, len(rows))
        most_queries = max(lengths[num_decodes:], default=0)
        inputs = cls(room, block_size, device, num_decodes=num_decodes, most_queries=most_queries)
        inputs.fill(slices, rows)
        return inputs

    def fill(
        self, slices: Sequence[SequenceSlice], rows: Ints, sampling: np.ndarray[Any, Any] | None = None
    ) -> None:
        """Takes in these slices, the packed rows to go on with, and how each is sampled (`ROW`s), and starts the copy
        to the device, on the current stream. What is beyond them becomes padding: nothing of it is written to the pool,
        and what is computed for it is undefined."""
        host, num_seqs = self._arrays, len(slices)
        counts = np.fromiter((len(piece.token_ids) for piece in slices), np.int64, num_seqs)
        starts = np.fromiter((piece.start for piece in slices), np.int64, num_seqs)
        query_starts, ends = self.batch.query_starts, self.batch.ends
        query_starts[1 : num_seqs + 1], ends[:num_seqs] = np.cumsum(counts), starts + counts
        num_tokens = int(query_starts[num_seqs])
        host["token_ids"][:num_tokens] = np.concatenate([np.asarray(p.token_ids, np.int64) for p in slices])
        for row, piece in enumerate(slices):
            self._write_table(row, tuple(piece.block_table))
        positions = np.arange(num_tokens) + np.repeat(starts - query_starts[:num_seqs], counts)
        blocks = host["block_tables"][np.repeat(np.arange(num_seqs), counts), positions // self._block_size]
        host["positions"][:num_tokens] = positions
        host["slots"][:num_tokens] = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        host["rows"][: len(rows)] = rows
        if sampling is not None:
            host["sampling"][: len(rows)] = sampling.view(np.int32).reshape(len(rows), -1)
        self._pad(num_tokens, num_seqs, len(rows))
        self._upload()

    def pad(self) -> None:
        """Makes padding of everything, on the device too."""
        self._pad(0, 0, 0)
        self._upload()

    def _pad(self, num_tokens: int, num_seqs: int, num_rows: int) -> None:
        """Makes padding of what is beyond these: one token each, nowhere."""
        host, room = self._arrays, self.room
        query_starts, ends = self.batch.query_starts, self.batch.ends
        query_starts[num_seqs + 1 :] = num_tokens + np.arange(1, room.num_seqs - num_seqs + 1)
        ends[num_seqs:] = 0
        host["query_starts"][:], host["ends"][:] = query_starts, ends
        host["token_ids"][num_tokens:], host["positions"][num_tokens:] = 0, 0
        host["slots"][num_tokens:] = NOWHERE
        host["rows"][num_rows:] = np.arange(num_rows, room.num_rows)
        host["sampling"][num_rows:] = 0

    def _write_table(self, row: int, table: tuple[int, ...]) -> None:
        """Tables mostly grow at their end, or not at all: only what is new is written."""
        before = self._tables[row]
        if table == before:
            return
        table = table[: self.room.most_blocks]
        kept = len(before) if table[: len(before)] == before else 0
        self._arrays["block_tables"][row, kept : len(table)] = table[kept:]
        self._tables[row] = table
        self._tables_changed = True

    def _upload(self) -> None:
        size = len(self._host) if self._tables_changed else self._tables_at
        self._device[:size].copy_(self._host[:size], non_blocking=True)
        self._tables_changed = False
