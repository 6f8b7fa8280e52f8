"""A tiny random Llama as a GGUF file, written as llama.cpp's converter writes one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
TOKENS = ["<|end|>", "a", "b", "c", "ab", "ba", "<user>", "d"]
MERGES = ["a b", "b a"]
CHAT_TEMPLATE = "{% for m in messages %}<user>{{ m.content }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """The shape, and random weights by their names in transformers."""

    num_layers: int = 2
    hidden: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate: int = 48

    def weights(self) -> dict[str, Array]:
        """The same at every call."""
        random = np.random.default_rng(5)

        def matrix(*shape: int) -> Array:
            return random.standard_normal(shape).astype(np.float32)

        hidden, kv = self.hidden, self.hidden // self.num_heads * self.num_kv_heads
        weights = {
            "model.embed_tokens.weight": matrix(len(TOKENS), hidden),
            "model.norm.weight": matrix(hidden),
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            weights |= {
                f"{prefix}input_layernorm.weight": matrix(hidden),
                f"{prefix}post_attention_layernorm.weight": matrix(hidden),
                f"{prefix}self_attn.q_proj.weight": matrix(hidden, hidden),
                f"{prefix}self_attn.k_proj.weight": matrix(kv, hidden),
                f"{prefix}self_attn.v_proj.weight": matrix(kv, hidden),
                f"{prefix}self_attn.o_proj.weight": matrix(hidden, hidden),
                f"{prefix}mlp.gate_proj.weight": matrix(self.intermediate, hidden),
                f"{prefix}mlp.up_proj.weight": matrix(self.intermediate, hidden),
                f"{prefix}mlp.down_proj.weight": matrix(hidden, self.intermediate),
            }
        return weights


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_llama(model: TinyLlama, file: Path) -> None:
    """Writes `model` in float32, the rows of q and k interleaved as GGUF's rotary embedding wants them."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(model.hidden // model.num_heads)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 1, 1, 1, 1, 1, 3, 1])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in model.weights().items():
        if "q_proj" in name or "k_proj" in name:
            weight = _interleave(weight, model.num_heads if "q_proj" in name else model.num_kv_heads)
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(weight: Array, num_heads: int) -> Array:
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
