"""Models: packed tokens in, hidden states and logits out, KV written to the paged pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from twinpool.kernels.paged_attention import PagedBatch

LayerDone = Callable[[int], None]


class Model(Protocol):
    """A decoder on packed ragged batches."""

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: PagedBatch,
        kv: torch.Tensor,
        rows: torch.Tensor,
        on_layer_done: LayerDone,
    ) -> torch.Tensor:
        """Runs all tokens and returns the final hidden states of those in `rows`: [len(rows), hidden].

        `token_ids` [tokens], `rows` [rows], int64. `kv` is the pool; each layer's KV of all tokens is written to it,
        then `on_layer_done(layer)` is called. `rows` may be empty.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        ...
