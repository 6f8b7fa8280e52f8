"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families; what tells them apart is read from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models import LayerDone
from twinpool.engine.models.rope_tables import rope_tables
from twinpool.engine.weights import Weights
from twinpool.kernels.activation import silu_mul
from twinpool.kernels.linear import Linear
from twinpool.kernels.paged_attention import AttentionParams, PagedBatch, paged_attention
from twinpool.kernels.rms_norm import add_rms_norm, rms_norm
from twinpool.kernels.rope_kv_write import rope_kv_write_


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; query, key and value maps fused, gate and up maps fused."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    feed_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    attention: AttentionParams


class Decoder:
    """Pre-norm transformer: rotary grouped-query attention, then a gated feed-forward."""

    def __init__(
        self, config: ModelConfig, weights: Weights, max_model_len: int, device: torch.device
    ) -> None:
        """Reads and fuses all weights.

        Raises:
            ModelError: a tensor is absent or has another shape than config.json says.
        """
        self._config = config
        vocab = (config.vocab_size, config.hidden_size)
        self._embedding = weights.get("model.embed_tokens.weight", vocab)
        self._layers = [_read_layer(config, weights, index) for index in range(config.num_layers)]
        self._final_norm = weights.get("model.norm.weight", (config.hidden_size,))
        head = self._embedding if config.tied_embeddings else weights.get("lm_head.weight", vocab)
        self._head = Linear(head)
        cos, sin = rope_tables(config, max_model_len)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: PagedBatch,
        kv: torch.Tensor,
        rows: torch.Tensor,
        on_layer_done: LayerDone,
    ) -> torch.Tensor:
        """As `Model.forward`. The last layer works on `rows` alone once its KV is written."""
        config = self._config
        residual = F.embedding(token_ids, self._embedding)
        x = rms_norm(residual, self._layers[0].input_norm, config.rms_eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index > 0:
                x = add_rms_norm(x, residual, layer.input_norm, config.rms_eps)
            query = self._write_kv(layer, index, x, batch, kv)
            on_layer_done(index)
            if index == last and len(rows) == 0:
                return residual[rows]
            x = paged_attention(query, kv, index, batch, layer.attention).flatten(1)
            if index == last:
                x, residual = x[rows], residual[rows]
            x = add_rms_norm(layer.output(x), residual, layer.feed_norm, config.rms_eps)
            x = layer.down(silu_mul(layer.gate_up(x)))
        return add_rms_norm(x, residual, self._final_norm, config.rms_eps)

    def _write_kv(
        self, layer: _Layer, index: int, x: torch.Tensor, batch: PagedBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        """Writes this layer's keys and values; returns the queries [tokens, heads, head_dim]."""
        config = self._config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        rope_kv_write_(
            qkv, self._cos, self._sin, batch.positions, kv, index, batch.slots,
            layer.query_norm, layer.key_norm, config.rms_eps,
        )  # fmt: skip
        return qkv[:, :heads]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        return self._head(hidden).float()


def _read_layer(config: ModelConfig, weights: Weights, index: int) -> _Layer:
    at = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = [f"{at}.self_attn.{name}_proj" for name in "qkv"]
    sizes = [query_size, kv_size, kv_size]
    gate_up = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]

    def linear(names: list[str], rows: list[int], columns: int, has_bias: bool) -> Linear:
        bias = weights.fused_bias([f"{name}.bias" for name in names], rows) if has_bias else None
        return Linear(weights.fused([f"{name}.weight" for name in names], rows, columns), bias)

    def head_norm(name: str) -> torch.Tensor | None:
        return weights.get(f"{at}.self_attn.{name}.weight", (config.head_dim,)) if config.qk_norm else None

    return _Layer(
        input_norm=weights.get(f"{at}.input_layernorm.weight", (hidden,)),
        qkv=linear(qkv, sizes, hidden, config.qkv_bias),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=linear([f"{at}.self_attn.o_proj"], [hidden], query_size, config.output_bias),
        feed_norm=weights.get(f"{at}.post_attention_layernorm.weight", (hidden,)),
        gate_up=linear(gate_up, [inner, inner], hidden, config.mlp_bias),
        down=linear([f"{at}.mlp.down_proj"], [hidden], inner, config.mlp_bias),
        attention=AttentionParams(config.head_dim**-0.5, config.windows[index]),
    )
