"""What a step reads on the CPU: the numbers of its slices, packed. Block tables are kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.kernels.paged_attention import PagedBatch
from twinpool.request import RequestKey

Ints = np.ndarray[Any, np.dtype[np.int64]]


class HostInputs:
    """Packs one step after the other. Of a sequence that the step before had too, and whose table is the same object,
    no block is looked at again: a join, a leave or a grown table costs its own numbers only."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[RequestKey, tuple[Sequence[int], Ints]] = {}

    def pack(self, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, PagedBatch]:
        """The slices one after the other: token ids, int64 [tokens], and where their KV is."""
        num_seqs = len(slices)
        tables = [self._table(piece) for piece in slices]
        if len(self._tables) > num_seqs:
            here = {piece.key for piece in slices}
            self._tables = {key: known for key, known in self._tables.items() if key in here}
        counts = np.array([len(piece.token_ids) for piece in slices], np.int64)
        starts = np.array([piece.start for piece in slices], np.int64)
        query_starts, table_starts = _sums(counts), _sums([len(table) for table in tables])
        num_tokens = int(query_starts[-1])
        token_ids = np.fromiter(
            chain.from_iterable(piece.token_ids for piece in slices), np.int64, num_tokens
        )
        positions, firsts = starts, table_starts[:-1]
        if num_tokens > num_seqs:
            positions = np.arange(num_tokens) + np.repeat(starts - query_starts[:-1], counts)
            firsts = np.repeat(firsts, counts)
        block_tables = np.concatenate(tables)
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = block_tables[firsts + blocks] * self._block_size + offsets
        return torch.from_numpy(token_ids), PagedBatch(
            query_starts=query_starts,
            ends=starts + counts,
            block_tables=block_tables,
            table_starts=table_starts,
            slots=torch.from_numpy(slots),
            positions=torch.from_numpy(positions),
        )

    def _table(self, piece: SequenceSlice) -> Ints:
        known = self._tables.get(piece.key)
        if known is not None and known[0] is piece.block_table:
            return known[1]
        table = np.array(piece.block_table, np.int64)
        # A list may be changed by its owner; only what cannot be is known again.
        if isinstance(piece.block_table, tuple):
            self._tables[piece.key] = piece.block_table, table
        return table


def _sums(counts: Sequence[int] | Ints) -> Ints:
    """0, and the sum of the first one, two, … of them."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
