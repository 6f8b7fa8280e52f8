"""Shapes read from config.json files: parameters as published, KV and windows by each family's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.made_configs import BARE_LLAMA_8B, shape_of

from twinpool.cli import main
from twinpool.planner.times.model_shapes import SHAPES, named_quantization

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "vocab_size": 65024,
}
GEMMA_2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14336,
    "vocab_size": 256000,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
QWEN_MOE = {
    **BARE_LLAMA_8B,
    "model_type": "qwen2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "openai-community/gpt2": (
        {**GPT2, "activation_function": "gelu_new"},
        124_439_808,
        12,
    ),
    "EleutherAI/gpt-neox-20b": (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 44,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "vocab_size": 50432,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": False,
        },
        20_554_567_680,
        64,
    ),
    "EleutherAI/gpt-j-6b": (
        {
            "model_type": "gptj",
            "n_layer": 28,
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_positions": 2048,
            "vocab_size": 50400,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
        },
        6_050_882_784,
        16,
    ),
    "bigcode/starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_layer": 40,
            "n_embd": 6144,
            "n_head": 48,
            "n_inner": 24576,
            "n_positions": 8192,
            "vocab_size": 49152,
            "activation_function": "gelu",
            "multi_query": True,
        },
        15_517_456_384,
        1,
    ),
    "bigcode/starcoder2-15b": (
        {
            "model_type": "starcoder2",
            "num_hidden_layers": 40,
            "hidden_size": 6144,
            "num_attention_heads": 48,
            "num_key_value_heads": 4,
            "intermediate_size": 24576,
            "vocab_size": 49152,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        15_957_889_024,
        4,
    ),
    "facebook/opt-6.7b": (
        {
            "model_type": "opt",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "word_embed_proj_dim": 4096,
            "num_attention_heads": 32,
            "ffn_dim": 16384,
            "max_position_embeddings": 2048,
            "vocab_size": 50272,
            "activation_function": "relu",
        },
        6_658_473_984,
        32,
    ),
    "bigscience/bloom-7b1": (
        {
            "model_type": "bloom",
            "n_layer": 30,
            "n_embed": 4096,
            "num_attention_heads": 32,
            "vocab_size": 250880,
        },
        7_069_016_064,
        32,
    ),
    "tiiuae/falcon-7b": (FALCON_7B, 6_921_720_704, 1),
    "tiiuae/falcon-40b": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
        41_303_293_952,
        8,
    ),
    "mosaicml/mpt-7b": (
        {
            "model_type": "mpt",
            "n_layers": 32,
            "d_model": 4096,
            "n_heads": 32,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "vocab_size": 50432,
            "no_bias": True,
            "attn_config": {"alibi": True, "attn_type": "multihead_attention"},
        },
        6_649_286_656,
        32,
    ),
    "microsoft/phi-2": (
        {
            "model_type": "phi",
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 51200,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": False,
        },
        2_779_683_840,
        32,
    ),
    "google/gemma-7b": (
        {
            "model_type": "gemma",
            "num_hidden_layers": 28,
            "hidden_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "intermediate_size": 24576,
            "vocab_size": 256000,
            "hidden_act": "gelu",
            "hidden_activation": "gelu_pytorch_tanh",
        },
        8_537_680_896,
        16,
    ),
    "google/gemma-2-9b": (GEMMA_2_9B, 9_241_705_984, 8),
    "zai-org/chatglm3-6b": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            "ffn_hidden_size": 13696,
            "padded_vocab_size": 65024,
            "seq_length": 8192,
            "tie_word_embeddings": False,
        },
        6_243_584_000,
        2,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (QWEN_MOE, 14_315_784_192, 16),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            **BARE_LLAMA_8B,
            "model_type": "deepseek_v2",
            "num_hidden_layers": 27,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
        15_706_484_224,
        16,
    ),
}
"""Of each model its config.json as far as sizes go, its parameters as its card or its files count them (embeddings once
where the head is the same; GPT-J's card says 2.5 M more than are in its files), and its KV heads."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_family_has_the_parameters_and_kv_heads_that_its_model_card_says(name: str, tmp_path: Path) -> None:
    """But for some norms, and biases of the head."""
    config, num_parameters, num_kv_heads = PUBLISHED[name]
    found = shape_of(tmp_path, config)
    assert found.num_parameters == pytest.approx(num_parameters, rel=2e-4)
    assert found.num_kv_heads == num_kv_heads


def test_bloom_of_a_config_json_is_the_one_of_the_list(tmp_path: Path) -> None:
    bloom = {
        "model_type": "bloom",
        "n_layer": 70,
        "n_embed": 14336,
        "num_attention_heads": 112,
        "vocab_size": 250880,
    }
    found = shape_of(tmp_path, {**bloom, "seq_length": 2048})
    assert found.num_parameters == SHAPES["bloom-176b"].num_parameters
    assert found.kv_elements == SHAPES["bloom-176b"].kv_elements


def test_queries_that_are_not_compressed_are_projected_at_once(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite activates 2.4 B parameters (its card), the head among them."""
    lite = shape_of(tmp_path, PUBLISHED["deepseek-ai/DeepSeek-V2-Lite"][0])
    assert lite.latent is not None
    assert lite.latent.query_rank == 0
    assert lite.attention_weights == 2048 * (16 * 192 + 576 + 16 * 128) + 512 * 16 * 256
    assert lite.active_weights + lite.head_weights == pytest.approx(2.4e9, rel=0.03)


def test_a_context_and_a_feed_forward_have_other_names_in_chatglm(tmp_path: Path) -> None:
    found = shape_of(tmp_path, PUBLISHED["zai-org/chatglm3-6b"][0])
    assert (found.max_positions, found.inner, found.vocab) == (8192, 13696, 65024)


def test_a_falcon_without_multi_query_has_a_kv_head_for_each_query_head(tmp_path: Path) -> None:
    assert shape_of(tmp_path, {**FALCON_7B, "multi_query": False}).num_kv_heads == 71


@pytest.mark.parametrize(
    ("fields", "window", "num_layers"),
    [
        ({}, 4096, 21),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, 4096, 35),
        ({"model_type": "cohere2", "hidden_act": "silu", "hidden_activation": None}, 4096, 32),
        ({"model_type": "mistral"}, 4096, 42),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"] + 41 * ["full_attention"]}, 4096, 1),
        ({"model_type": "qwen2_moe", "hidden_activation": "silu", "use_sliding_window": False}, None, 0),
        ({"model_type": "qwen3_moe", "hidden_activation": "silu"}, None, 0),
    ],
)
def test_windows_are_in_the_layers_that_the_family_has_them_in(
    fields: dict[str, Any], window: int | None, num_layers: int, tmp_path: Path
) -> None:
    """Gemma 2: each second of 42 layers; Gemma 3: all but each sixth; Cohere 2: all but each fourth; Mistral: all."""
    found = shape_of(tmp_path, {**GEMMA_2_9B, **fields})
    assert (found.window, found.num_window_layers) == (window, num_layers)


def test_a_name_that_says_8_or_4_bits_needs_its_precision_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights would count as 16 bits else, at up to four times their size."""
    flags = (
        "simulate",
        "--gpu",
        "h200",
        "--num-prompts",
        "2",
        "--disable-tqdm",
        "--model",
        "Qwen/Qwen3-8B-FP8",
    )
    assert main(list(flags)) == 2
    told = capsys.readouterr().err
    assert "--precision is not given, and 'Qwen/Qwen3-8B-FP8' says that weights are quantized (fp8)" in told
    assert main([*flags, "--precision", "fp8"]) == 0


def test_what_a_name_says_of_its_weights(tmp_path: Path) -> None:
    assert named_quantization("nvidia/DeepSeek-R1-NVFP4") == "nvfp4"
    assert named_quantization("nvidia/Llama-3.1-8B-Instruct-FP8") == "fp8"
    assert named_quantization("meta-llama/Llama-3.1-8B-Instruct") is None
    folder = tmp_path / "qwen3-8b-fp8"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert named_quantization(str(folder)) is None, "its config.json says it"
