"""What a config.json may say that changes a model's weights or KV, and that planning does not read. Such a model is
refused by the key's name: sizes that are wrong in silence are worse than none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from twinpool.errors import ModelError

_LAYER_KINDS = {"full_attention", "sliding_attention"}
_HARMLESS: dict[str, tuple[object, ...]] = {
    # Which layers have experts, if not all behind the first (Llama 4, Jamba, Qwen, Arctic, Step, Ernie, AFMoE …).
    "interleave_moe_layer_step": (1,),
    "expert_layer_period": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": (),
    "mlp_layer_types": ("sparse",),
    "moe_layer_freq": (1,),
    "moe_layer_frequency": (1,),
    "moe_layer_interval": (1,),
    "moe_layer_start_index": (),
    "moe_layers": (),
    "moe_layers_enum": (),
    "num_dense_layers": (),
    "parallel_attn_mlp_res": (),
    # How many experts, and of what size, by other names (DBRX, Ernie 4.5, Hunyuan, Granite, Llama 4, LongCat).
    "ffn_config.moe_num_experts": (1,),
    "ffn_config.ffn_type": ("mptmlp",),
    "moe_k": (),
    "moe_topk": (),
    "moe_hidden_size": (),
    "moe_latent_size": (),
    "moe_shared_expert_intermediate_size": (),
    "shared_intermediate_size": (),
    "intermediate_size_mlp": (),
    "expert_ffn_hidden_size": (),
    "zero_expert_num": (),
    # Layers without KV, or with KV of another kind (Jamba, Nemotron-H, Bamba, Zamba, Qwen3-Next, Kimi Linear, LFM2 …).
    "attn_layer_period": (1,),
    "attn_layer_indices": (),
    "attn_type_list": (1,),
    "hybrid_override_pattern": (),
    "hybrid_layer_pattern": (),
    "hybrid_layer_ids": (),
    "layers_block_type": ("attention",),
    "block_types": ("attention",),
    "_block_types": ("attention",),
    "full_attn_idxs": (),
    "full_attention_interval": (1,),
    "layer_group_size": (1,),
    "linear_attn_config": (),
    "linear_num_value_heads": (),
    "attention_chunk_size": (),
    "attention_types": (),
    "compress_ratios": (),
    "index_topk": (),
    "cross_attention_layers": (),
    "add_cross_attention": (),
    # KV heads, or layers, that differ from each other or share (Gemma 3n and 4, Hunyuan, Nemotron-NAS, Step, Ouro).
    "num_kv_shared_layers": (),
    "num_key_value_heads_per_layer": (),
    "num_global_key_value_heads": (),
    "global_head_dim": (),
    "attention_k_eq_v": (),
    "hidden_size_per_layer_input": (),
    "use_cla": (),
    "block_configs": (),
    "total_ut_steps": (1,),
    "attn_config.kv_n_heads": (),
    "attn_config.attn_type": ("multihead_attention",),
    "n_kv_heads": (),
    "num_query_groups": (),
    "num_attention_groups": (),
}
"""Keys that are not read, and with which values they change nothing; absent, null, 0 and empty never do."""
_STATE_SPACE = ("mamba_", "ssm_", "swa_")
"""How keys begin of layers that are not attention, or whose attention has sizes of its own."""
_EXPERTS = re.compile(r"(moe_)?(num|n)_(\w+_)?experts?")
_READ = {"num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"}
_MODEL_TYPES = {"jetmoe": "experts in its attention", "qwen": "an intermediate_size that is twice its own"}


def refuse_unplanned(raw: Mapping[str, Any], file: Path) -> None:
    """Raises ModelError, with key and value, if `raw`, the decoder's part of `file`, is of a model whose sizes what is
    read of it does not tell."""
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"{file} has an encoder beside the decoder; wanted: a decoder alone")
    kinds = {str(kind) for kind in raw.get("layer_types") or ()}
    if unknown := sorted(kinds - _LAYER_KINDS):
        raise ModelError(
            f"{file} has layers of {', '.join(unknown)}; wanted: {', '.join(sorted(_LAYER_KINDS))}"
        )
    if (what := _MODEL_TYPES.get(str(raw.get("model_type")))) is not None:
        raise ModelError(f"{file} has model_type {raw['model_type']!r}: {what}, which is not planned for")
    for key, value in _flat(raw):
        harmless = _harmless(key)
        if harmless is None or not value:
            continue
        if all(each in harmless for each in (value if isinstance(value, list) else [value])):
            continue
        wanted = " or ".join(["none", *map(str, harmless)])
        raise ModelError(
            f"{file} has {key} {shortened(value)}, which changes a model's sizes and is not planned for; wanted: "
            f"{wanted}"
        )


def _harmless(key: str) -> tuple[object, ...] | None:
    """The values of a key that is not read; None: the key is read, or no matter of size."""
    if key in _HARMLESS:
        return _HARMLESS[key]
    is_unread = key.startswith(_STATE_SPACE) or (_EXPERTS.fullmatch(key) and key not in _READ)
    return () if is_unread else None


def _flat(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those of the groups that DBRX and MPT have as group.key."""
    for key, value in raw.items():
        if key in ("attn_config", "ffn_config") and isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value
