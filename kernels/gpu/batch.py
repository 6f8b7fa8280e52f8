"""What the GPU's attention kernels read of a batch: on the device, so that no launch waits for the host and one CUDA
graph serves every content of its buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A packed ragged batch as int32 tensors on the model's device.

    Sequence s has the query rows [query_starts[s], query_starts[s + 1]), which stand at the end of its `ends[s]`
    tokens; token j's KV is in block block_tables[s, j // block_size]. Table entries that no token needs are never read.

    The first `num_decodes` sequences have exactly one query each: sequence s's is row s. The others have at most
    `most_queries` each. A sequence with `ends[s] == 0` is padding: nothing is read or written for it, so the output's
    rows for it are undefined. Kernels launch by the host's figures alone (`num_decodes`, `most_queries`, the shapes),
    which therefore belong to a captured graph; all else may change between replays.
    """

    query_starts: torch.Tensor
    """[seqs + 1]"""
    ends: torch.Tensor
    """[seqs]"""
    block_tables: torch.Tensor
    """[seqs, most blocks], rows may be slices of wider ones; its width bounds the context that launches are made for"""
    num_decodes: int
    most_queries: int

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch, padding included."""
        return int(self.ends.shape[0])
