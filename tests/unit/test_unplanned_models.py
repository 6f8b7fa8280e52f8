"""What of a config.json changes a model's sizes and is not read is refused, with key and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.made_configs import BARE_LLAMA_8B, shape_of

from twinpool.errors import ModelError
from twinpool.planner.times.model_shapes import SHAPES


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"interleave_moe_layer_step": 2},
            "interleave_moe_layer_step 2, which changes .*; wanted: none or 1",
        ),
        ({"expert_layer_period": 2}, "expert_layer_period 2"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"mlp_only_layers": [0, 5]}, r"mlp_only_layers \[0, 5\]"),
        ({"moe_layer_freq": [0, 1, 1]}, r"moe_layer_freq \[0, 1, 1\]"),
        ({"moe_num_experts": 64, "moe_k": 6}, "moe_num_experts 64"),
        ({"num_shared_experts": 1}, "num_shared_experts 1"),
        ({"ffn_config": {"moe_num_experts": 16}}, "ffn_config.moe_num_experts 16"),
        ({"attn_layer_period": 8}, "attn_layer_period 8"),
        ({"attn_layer_indices": [9, 18]}, r"attn_layer_indices \[9, 18\]"),
        ({"hybrid_override_pattern": "M-M*"}, r"hybrid_override_pattern 'M-M\*'"),
        ({"mamba_d_state": 128}, "mamba_d_state 128"),
        ({"attn_type_list": [0, 1]}, r"attn_type_list \[0, 1\]"),
        ({"full_attention_interval": 4}, "full_attention_interval 4"),
        ({"attn_config": {"kv_n_heads": 8}}, "attn_config.kv_n_heads 8"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers 15"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 and hidden_size 4096"),
        ({"v_head_dim": 192}, "v_head_dim 192 and head_dim 128"),
        (
            {"model_type": "new", "sliding_window": 512, "sliding_window_pattern": 6},
            "sliding_window_pattern 6",
        ),
        (
            {"model_type": "new", "sliding_window": 512},
            "sliding_window 512, which does not tell which layers",
        ),
        (
            {"model_type": "qwen2_moe", "sliding_window": 512, "use_sliding_window": True},
            "sliding_window 512",
        ),
        (
            {"model_type": "new", "hidden_act": "gelu"},
            "model_type 'new' and hidden_act 'gelu', which does not",
        ),
        ({"model_type": "new", "hidden_act": None}, "model_type 'new' and no hidden_act"),
        ({"intermediate_size": None}, "model_type is 'llama', and intermediate_size is missing"),
        ({"model_type": "jetmoe"}, "model_type 'jetmoe': experts in its attention"),
        ({"num_key_value_heads": None, "num_kv_heads": 5}, "32 query heads over 5 key/value heads"),
        ({"num_key_value_heads": None, "multi_query_attention": True}, "multi_query_group_num"),
    ],
)
def test_what_changes_sizes_and_is_not_read_is_refused_by_its_name(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        shape_of(tmp_path, {**BARE_LLAMA_8B, **fields})


def test_keys_that_say_that_all_layers_are_alike_change_nothing(tmp_path: Path) -> None:
    alike = {
        "interleave_moe_layer_step": 1,
        "attn_type_list": 32 * [1],
        "mlp_only_layers": [],
        "add_cross_attention": False,
        "moe_num_experts": 0,
        "num_local_experts": None,
        "v_head_dim": 128,
        "word_embed_proj_dim": 4096,
    }
    found = shape_of(tmp_path, {**BARE_LLAMA_8B, **alike})
    assert found.num_parameters == SHAPES["llama-3.1-8b"].num_parameters
