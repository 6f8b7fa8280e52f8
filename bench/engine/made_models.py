"""Models with random weights, written without transformers: a directory that `ModelRunner.load` reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class MadeShape:
    """What a model of the Llama or Qwen3 family is made of, in elements and counts. By default a tiny one."""

    num_layers: int = 3
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 88
    vocab_size: int = 131
    max_positions: int = 256
    qk_norm: bool = False


SMOLLM2_135M = MadeShape(30, 576, 9, 3, 64, 1536, 49_152, 8192)
LLAMA_8B_4_LAYERS = MadeShape(4, 4096, 32, 8, 128, 14_336, 32_768, 8192)


def make_model(
    directory: Path,
    shape: MadeShape,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scale: float = 0.2,
) -> Path:
    """Writes config.json and weights of standard deviation `scale` (norms: about 1), the same at every call with the
    same `device`, which draws them. Returns `directory`."""
    config = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in _tensors(shape).items():
        drawn = torch.randn(size, generator=generator, device=device)
        tensors[name] = (drawn * scale + (1.0 if len(size) == 1 else 0.0)).to("cpu", dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(shape: MadeShape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape.num_layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if shape.qk_norm:
            parts |= {"self_attn.q_norm": (shape.head_dim,), "self_attn.k_norm": (shape.head_dim,)}
        tensors |= {f"model.layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return tensors
