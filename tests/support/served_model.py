"""A model directory that `twinpool serve` starts from in seconds: random weights, real tokenizer, real chat template.

Its answers are noise, but as exact as any: what must be equal is equal to the last token, and what goes astray shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.gateway import CHAT_TEMPLATE, tiny_tokenizer

SHAPE: Mapping[str, int] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}


def save_served_model(directory: Path, seed: int = 0) -> Path:
    """Writes config, weights (float32) and tokenizer into `directory`; returns it."""
    tokenizer = tiny_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.eos_token_ids[0],
        **SHAPE,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    save_file(_weights(seed), str(directory / "model.safetensors"))
    return directory


def _weights(seed: int) -> dict[str, torch.Tensor]:
    hidden, inner, head = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * head, SHAPE["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (SHAPE["vocab_size"], hidden)}
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm": (hidden,),
            f"{name}.self_attn.q_proj": (queries, hidden),
            f"{name}.self_attn.k_proj": (keys, hidden),
            f"{name}.self_attn.v_proj": (keys, hidden),
            f"{name}.self_attn.o_proj": (hidden, queries),
            f"{name}.post_attention_layernorm": (hidden,),
            f"{name}.mlp.gate_proj": (inner, hidden),
            f"{name}.mlp.up_proj": (inner, hidden),
            f"{name}.mlp.down_proj": (hidden, inner),
        }
    shapes |= {"model.norm": (hidden,), "lm_head": (SHAPE["vocab_size"], hidden)}
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }
