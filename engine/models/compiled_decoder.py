"""The own families' decoder on a CPU: packed weights, buffers that are kept, and one compiled call for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twinpool.engine.batch import LayerGroupsDone
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models import LayerDone, ignore_layer
from twinpool.engine.models.packed_weights import pack_weights
from twinpool.engine.models.rope_tables import rope_tables
from twinpool.engine.models.stack import Buffers, Shape, Step, Tables, run_head, run_layers
from twinpool.engine.weights import Weights
from twinpool.kernels.attention_cpu import scratch_size
from twinpool.kernels.jit import flat
from twinpool.kernels.linear import SUMS, aligned, padded, panel_scratch_size
from twinpool.kernels.paged_attention import PagedBatch
from twinpool.kernels.team import Team

_MOST_FUSED_ROWS = 64
"""Logits of so many rows, or of one for each sequence, are computed in the same call as the layers, into a buffer that
is kept; of more, when they are asked for."""
_LEAST_BYTES_PER_RANK = 1 << 16
"""A layer of fewer bytes per rank is read sooner than ranks have met eight times."""


class CompiledDecoder:
    """As `Decoder`, to the same weights, on a CPU. One step at a time.

    Without a `team` it makes one: as many threads as torch has then, if a layer is large enough to be shared.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, max_model_len: int, dtype: torch.dtype, team: Team | None = None,
        *, as_integers: bool = False,
    ) -> None:  # fmt: skip
        """Reads and packs all weights; `dtype` is theirs. `as_integers`: the layers' matrices are rounded to int8.

        Raises:
            ModelError: a tensor is absent or has another shape than config.json says.
        """
        self._config = config
        self._dtype = dtype
        self._weights = pack_weights(config, weights, dtype, as_integers=as_integers)
        self._sums_size = SUMS
        if as_integers:
            widest = max(config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
            self._sums_size += panel_scratch_size(widest, dtype)
        cos, sin = rope_tables(config, max_model_len)
        self._tables = Tables(flat(cos), flat(sin))
        self._shape = Shape(
            config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.intermediate_size, config.vocab_size, np.float32(config.rms_eps),
            np.float32(config.head_dim**-0.5), np.array([window or 0 for window in config.windows]),
        )  # fmt: skip
        layer_bytes = self._weights.flat.nbytes // config.num_layers
        self._team = team or Team(max(1, min(torch.get_num_threads(), layer_bytes // _LEAST_BYTES_PER_RANK)))
        self._num_fused = 0
        self._make_buffers(1, 1)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: PagedBatch,
        kv: torch.Tensor,
        rows: torch.Tensor,
        on_layer_done: LayerDone,
    ) -> torch.Tensor:
        """As `Model.forward`. What comes back is valid until the next call: rows of whole words, bfloat16 as its bits.

        Raises:
            IndexError: a token id is not in the vocabulary.
        """
        has_head = len(rows) <= max(_MOST_FUSED_ROWS, len(batch.ends))
        step = Step(
            token_ids.numpy(), batch.positions.numpy(), batch.slots.numpy(), batch.query_starts, batch.ends,
            batch.block_tables, batch.table_starts, rows.numpy(), has_head,
        )  # fmt: skip
        if int(step.token_ids.view(np.uint64).max()) >= self._shape.vocab:
            raise IndexError(f"token ids are 0 to {self._shape.vocab - 1}; found {step.token_ids.tolist()}")
        self._num_fused = len(rows) if has_head else 0
        self._make_room(len(step.token_ids), self._num_fused)
        layers = self._config.num_layers
        ends: Sequence[int] = range(1, layers + 1)
        if on_layer_done is ignore_layer:
            ends = (layers,)
        elif isinstance(on_layer_done, LayerGroupsDone):
            ends = sorted({layers, *(layer + 1 for layer in on_layer_done.last_layers)})
        first = 0
        for end in ends:
            self._team.run(
                run_layers, first, end, self._shape, self._weights, self._tables, step, flat(kv), tuple(kv.shape),
                kv.stride(), self._buffers,
            )  # fmt: skip
            on_layer_done(end - 1)
            first = end
        return self._hidden[: len(rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Model.logits`: of rows that the latest `forward` gave, one after the other."""
        num_rows, vocab = len(hidden), self._shape.vocab
        if num_rows == self._num_fused and hidden.data_ptr() == self._hidden.data_ptr():
            return torch.from_numpy(self._buffers.logits[: num_rows * vocab]).view(num_rows, vocab)
        logits = aligned(num_rows * vocab, torch.float32)
        self._team.run(
            run_head,
            num_rows,
            self._shape,
            self._weights,
            hidden.numpy().reshape(-1),
            self._buffers.sums,
            logits,
        )
        return torch.from_numpy(logits).view(num_rows, vocab)

    def _make_room(self, num_tokens: int, num_rows: int) -> None:
        """Buffers for so many tokens and rows of logits, or more: powers of two, so that they seldom grow."""
        tokens = len(self._buffers.residual) // padded(self._shape.hidden, self._dtype)
        rows = len(self._buffers.logits) // self._shape.vocab
        if num_tokens > tokens or num_rows > rows:
            self._make_buffers(
                max(tokens, 1 << (num_tokens - 1).bit_length()),
                max(rows, 1 << max(num_rows - 1, 0).bit_length()),
            )

    def _make_buffers(self, tokens: int, rows: int) -> None:
        shape, size = self._shape, self._team.size
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def room(width: int) -> np.ndarray[Any, Any]:
            buffer = aligned(tokens * padded(width, self._dtype), self._dtype)
            buffer[:] = 0  # what fills up an odd row takes part in products
            return buffer

        itemsize = self._weights.flat.itemsize
        scratch = scratch_size(shape.num_heads, shape.num_kv_heads, shape.head_dim, itemsize)
        self._buffers = Buffers(
            residual=room(shape.hidden), normed=room(shape.hidden), qkv=room(query_size + 2 * kv_size),
            attended=room(query_size), gated=room(shape.inner), logits=aligned(rows * shape.vocab, torch.float32),
            sums=aligned(size * self._sums_size, torch.float32), scratch=aligned(size * scratch, torch.float32),
        )  # fmt: skip
        self._hidden = torch.from_numpy(self._buffers.normed).view(tokens, padded(shape.hidden, self._dtype))
