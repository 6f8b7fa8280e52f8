"""Models as their config.json files tell of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinpool.planner.times.config_shapes import of_directory
from twinpool.planner.times.model_shapes import ModelShape

BARE_LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Sizes alone: no class that serving knows, no context."""
LLAMA_8B = BARE_LLAMA_8B | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072}


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Makes `folder` a model's directory without weights."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def shape_of(folder: Path, config: Mapping[str, Any]) -> ModelShape:
    """What is planned for with such a file, written into `folder`."""
    return of_directory(write_config(folder, config))
