"""Models: packed tokens in, hidden states and logits out, KV written to the paged pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from twinpool.kernels.paged_attention import PagedBatch

LayerDone = Callable[[int], None]


def ignore_layer(_layer: int) -> None:
    """The `on_layer_done` of those who need none: models may then do all layers in one go."""


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
        """Runs all tokens and returns, for those in `rows`, what `logits` takes: the final hidden states [len(rows),
        hidden], or the logits already.

        `token_ids` [tokens], `rows` [rows], int64. `kv` is the pool; each layer's KV of all tokens is written to it,
        then `on_layer_done(layer)` is called. `rows` may be empty.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the latest `forward` gave, or some of its rows that follow each other → float32 [rows, vocab], the
        caller's to change until the next `forward`. Each row is asked for once."""
        ...
