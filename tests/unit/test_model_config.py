"""What is read from config.json, in the spellings that models come with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinpool.engine.model_config import ModelConfig
from twinpool.errors import ModelError
from twinpool.layout import Dtype

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008],
}  # fmt: skip


def read(directory: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_dir(directory)


def test_kv_of_the_textbook_model_takes_128_kib_per_token(tmp_path: Path) -> None:
    layout = read(tmp_path).kv_layout(16, Dtype.BFLOAT16)
    assert layout.token_bytes == 128 << 10
    assert layout.token_bytes * 4096 == 512 << 20
    assert layout.num_blocks(2300) == 144
    assert 144 * layout.block_bytes == 288 << 20


def test_eos_ids_of_both_files_are_joined_without_repeats(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [128009, 128001]}).eos_token_ids == (128009, 128001, 128008)
    assert read(tmp_path, {}, eos_token_id=2).eos_token_ids == (2,)
    assert read(tmp_path, {}, eos_token_id=None).eos_token_ids == ()


def test_old_and_new_spellings_of_rope_and_dtype_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read(
        tmp_path, rope_theta=500000.0, rope_scaling=scaling | {"type": "llama3"}, torch_dtype="float16"
    )
    new = read(
        tmp_path, torch_dtype=None, dtype="float16",
        rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 500000.0},
    )  # fmt: skip
    assert old == new
    assert (new.rope.theta, new.rope.kind, new.rope.original_max_positions) == (500000.0, "llama3", 8192)


def test_head_size_and_key_heads_have_their_usual_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads, config.num_heads) == (128, 32, 32)
    assert read(tmp_path, head_dim=64).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True,
          "max_window_layers": 3}, (None, None, None, 64)),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, (64, None, 64, None)),
    ],
)  # fmt: skip
def test_each_layer_has_its_window(
    changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, num_hidden_layers=4, **changes).windows == windows


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Gemma2ForCausalLM"]},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_what_the_own_decoder_does_not_do_goes_through_transformers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert read(tmp_path).family == "llama"
    assert read(tmp_path, **changes).family is None


def test_the_names_of_gpt2_are_understood(tmp_path: Path) -> None:
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    config = ModelConfig.from_dir(tmp_path)
    assert (config.num_layers, config.num_heads, config.hidden_size, config.max_positions) == (
        12,
        12,
        768,
        1024,
    )


def test_a_multimodal_model_is_described_by_its_text_part(tmp_path: Path) -> None:
    config = read(
        tmp_path, architectures=["Gemma3ForConditionalGeneration"], text_config={"num_hidden_layers": 7}
    )
    assert config.num_layers == 7


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "is an object"),
        ('{"model_type": "llama"}', "'num_hidden_layers' is missing"),
        (json.dumps(LLAMA | {"num_key_value_heads": 5}), "32 query heads over 5"),
        (json.dumps(LLAMA | {"vocab_size": "many"}), "does not describe a decoder"),
    ],
)
def test_a_useless_config_is_refused_with_its_reason(
    content: str | None, wanted: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=wanted):
        ModelConfig.from_dir(tmp_path)
