"""Model shapes: parameters and KV as published, and the same from a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.made_configs import LLAMA_8B, write_config

from twinpool.cli import main
from twinpool.errors import ConfigError, ModelError
from twinpool.layout import Dtype
from twinpool.planner.times.config_shapes import of_directory
from twinpool.planner.times.model_shapes import SHAPES, Experts, known_shape, model_shape

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-70b": 68_976_648_192,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
}
"""As model cards count them."""
ROUNDED = {
    "opt-13b": 13e9,
    "opt-66b": 66e9,
    "opt-175b": 175e9,
    "bloom-176b": 176e9,
    "gpt-oss-120b": 117e9,
    "deepseek-v3": 671e9,
    "kimi-k2": 1_026e9,
    "minimax-m2": 229e9,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    assert SHAPES[name].num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_about_what_the_name_says(name: str) -> None:
    assert SHAPES[name].num_parameters == pytest.approx(ROUNDED[name], rel=0.012)


def test_every_model_cites_where_its_figures_are_from() -> None:
    assert set(PARAMETERS) | set(ROUNDED) == set(SHAPES)
    assert all(shape.source for shape in SHAPES.values())


def test_kv_counts_key_value_heads_never_query_heads() -> None:
    """2 × 32 layers × 8 heads × 128 × 2 bytes = 128 KiB; 70B 320 KiB, 405B 504 KiB."""
    sizes = {name: SHAPES[name].kv_layout(16, Dtype.BFLOAT16).token_bytes for name in SHAPES}
    assert sizes["llama-3.1-8b"] == 128 << 10
    assert sizes["llama-3.1-70b"] == 320 << 10
    assert sizes["llama-3.1-405b"] == 504 << 10
    assert sizes["opt-13b"] == 800 << 10
    assert sizes["deepseek-v3"] == 61 * 576 * 2
    assert all(size == 2 * SHAPES[name].kv_elements for name, size in sizes.items())


def test_a_token_is_multiplied_with_its_experts_alone() -> None:
    """Qwen3-235B-A22B activates 22 B and GPT-OSS-120B 5.1 B parameters, with the embeddings' share of them."""
    qwen, oss, mixtral = (SHAPES[name] for name in ("qwen3-235b-a22b", "gpt-oss-120b", "mixtral-8x7b"))
    assert qwen.active_weights + 2 * qwen.head_weights == pytest.approx(22.2e9, rel=0.01)
    assert oss.active_weights + oss.head_weights == pytest.approx(5.1e9, rel=0.02)
    assert mixtral.active_weights + 2 * mixtral.head_weights == pytest.approx(12.9e9, rel=0.01)


def test_weights_in_8_bits_leave_embeddings_in_16() -> None:
    shape = SHAPES["llama-3.1-8b"]
    assert shape.weight_bytes(2.0) == 2 * shape.num_parameters
    matrices = 32 * (2 * (32 + 8) * 128 + 3 * 14_336) * 4_096
    assert shape.weight_bytes(1.0) == matrices + 2 * (shape.num_parameters - matrices)


def test_a_config_json_makes_the_same_shape_as_the_list(tmp_path: Path) -> None:
    found, known = of_directory(write_config(tmp_path, LLAMA_8B)), SHAPES["llama-3.1-8b"]
    assert found.num_parameters == known.num_parameters
    assert found.active_weights == known.active_weights
    assert found.kv_elements == known.kv_elements


def test_a_mixture_is_read_from_its_config_json(tmp_path: Path) -> None:
    found = of_directory(write_config(tmp_path, QWEN3_MOE))
    assert found.experts == Experts(128, 8, 1536)
    assert found.num_parameters == pytest.approx(SHAPES["qwen3-235b-a22b"].num_parameters, rel=1e-6)


def test_a_mixture_without_its_experts_per_token_is_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts_per_tok"}
    with pytest.raises(ModelError, match="experts_per_tok"):
        of_directory(write_config(tmp_path, config))


def test_latent_attention_is_read_from_its_config_json(tmp_path: Path) -> None:
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config = {**LLAMA_8B, **latent, "v_head_dim": 128}
    assert of_directory(write_config(tmp_path, config)).kv_elements == 32 * 576


def test_a_models_name_may_have_an_owner_and_what_it_was_tuned_for() -> None:
    assert known_shape("meta-llama/Llama-3.1-8B-Instruct") is SHAPES["llama-3.1-8b"]
    assert known_shape("nvidia/DeepSeek-R1-NVFP4") is SHAPES["deepseek-v3"]
    assert known_shape("llama2-70b") is SHAPES["llama-2-70b"]
    assert known_shape("llama-7b") is None


def test_an_unknown_model_is_told_which_are_known(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--model is '.*nowhere'; allowed: smollm2-135m, .*, a directory with"
    ):
        model_shape(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 0}, "does not describe a decoder: its hidden_size is 0"),
        ({"vocab_size": -1}, "its vocab_size is -1"),
        ({"is_encoder_decoder": True}, "an encoder beside the decoder"),
        (
            {"layer_types": ["linear_attention"] * 32},
            "layers of linear_attention; wanted: full_attention, sliding",
        ),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "9 of 8 experts for each token"),
    ],
)
def test_what_is_no_decoder_of_kv_is_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **fields}))
    with pytest.raises(ModelError, match=words):
        of_directory(tmp_path)


def test_a_quantized_models_precision_must_be_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights would count as 16 bits else."""
    quantized = {**LLAMA_8B, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    flags = ("simulate", "--gpu", "h100", "--model", str(tmp_path), "--num-prompts", "2", "--disable-tqdm")
    assert main(list(flags)) == 2
    assert "weights are quantized (gptq); say what they are held in: fp32, bf16" in capsys.readouterr().err
    assert main([*flags, "--precision", "int4"]) == 0
