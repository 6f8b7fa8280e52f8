"""The shape that a model directory's config.json describes, by the names that families have for things, and by what a
family's own name says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinpool.engine.model_config import ModelConfig
from twinpool.errors import ModelError
from twinpool.planner.times.model_shapes import Experts, LatentAttention, ModelShape
from twinpool.planner.times.unplanned import refuse_unplanned

_BIASED = {"bloom", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2"}
"""Families whose matrices all have biases, and whose norms have, unless their config.json says otherwise."""
_BARE = _BIASED | {"apertus", "arcee", "codegen", "falcon", "gptj", "mpt", "nemotron", "persimmon"}
"""Families whose feed-forward has no gate, whatever its activation: two matrices, of 4 × hidden if not said."""
_GEMMA = {"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma"}
_GATED = _GEMMA | {"chatglm", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"}
"""Families whose feed-forward has a gate, whatever its activation."""
_GEMMA_HEAD_DIM = 256
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
"""By their names; Gemma's config.json has two of them, of which the first counts."""
_GATING = ("silu", "swiglu", "swish")
_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}
"""Families with learned positions, and how many they have beyond their context."""
_WINDOW_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
"""Families of which each so manyth layer sees everything and the others a window, if `layer_types` does not say."""
_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Families whose `sliding_window` is that of all layers."""


def of_directory(path: str | Path, name: str | None = None) -> ModelShape:
    """The shape in a model directory's config.json.

    Raises:
        ModelError: the file is absent, does not describe a decoder whose layers all attend to KV, or has what changes
            sizes in a way that is not known here.
    """
    config = ModelConfig.from_dir(path)
    file = Path(path) / "config.json"
    top = json.loads(file.read_text(encoding="utf-8"))
    raw = {**top, **top["text_config"]} if isinstance(top.get("text_config"), dict) else top
    refuse_unplanned(raw, file)
    _check(config, raw, file)
    try:
        return _shape(config, raw, file, name or Path(path).name, _quantization(top))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise ModelError(f"{file} does not describe its experts or its attention: {exc!r}") from exc


def _shape(
    config: ModelConfig, raw: Mapping[str, Any], file: Path, name: str, quantization: str | None
) -> ModelShape:
    kind = str(raw.get("model_type", ""))
    experts = _experts(raw)
    head_dim = _head_dim(config, raw, kind)
    num_kv_heads = _num_kv_heads(config, raw, kind)
    inner = _inner(config, raw, kind, file) if experts is None or experts.num_dense_layers else 0
    max_positions = config.max_positions
    if not any(raw.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")):
        max_positions = int(raw.get("seq_length") or max_positions)
    window, num_window_layers = _window(config, raw, kind, file)
    return ModelShape(
        name=name,
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        inner=inner or config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=max_positions,
        source=str(file),
        is_gated=_is_gated(raw, kind, file),
        tied_embeddings=config.tied_embeddings,
        experts=experts,
        latent=_latent(raw),
        window=window,
        num_window_layers=num_window_layers,
        num_vectors=_num_vectors(config, raw, kind, (config.num_heads + 2 * num_kv_heads) * head_dim, inner),
        num_positions=max_positions + _POSITIONS[kind] if kind in _POSITIONS else 0,
        quantization=quantization,
    )


def _check(config: ModelConfig, raw: Mapping[str, Any], file: Path) -> None:
    for what in (
        "hidden_size",
        "head_dim",
        "num_kv_heads",
        "intermediate_size",
        "vocab_size",
        "max_positions",
    ):
        if (number := getattr(config, what)) < 1:
            raise ModelError(f"{file} does not describe a decoder: its {what} is {number}")
    wanted = {"word_embed_proj_dim": ("hidden_size", config.hidden_size)}
    if not raw.get("kv_lora_rank"):
        wanted["v_head_dim"] = ("head_dim", config.head_dim)
    for key, (other, number) in wanted.items():
        if raw.get(key) and raw[key] != number:
            raise ModelError(
                f"{file} has {key} {raw[key]!r} and {other} {number}, which is not planned for; wanted: both alike"
            )


def _quantization(top: Mapping[str, Any]) -> str | None:
    found = top.get("quantization_config")
    if not found:
        return None
    return str(found.get("quant_method", "some method") if isinstance(found, dict) else found)


def _head_dim(config: ModelConfig, raw: Mapping[str, Any], kind: str) -> int:
    if raw.get("head_dim"):
        return config.head_dim
    return _GEMMA_HEAD_DIM if kind in _GEMMA else int(raw.get("kv_channels") or config.head_dim)


def _num_kv_heads(config: ModelConfig, raw: Mapping[str, Any], kind: str) -> int:
    """As Falcon, GPT-BigCode and ChatGLM say it, too: one for all queries where `multi_query` is on (the default of the
    former two), but not in Falcon's newer layers."""
    if raw.get("num_key_value_heads"):
        return config.num_kv_heads
    is_shared = raw.get("multi_query", kind in ("falcon", "gpt_bigcode"))
    if is_shared and not raw.get("new_decoder_architecture"):
        return 1
    found = raw.get("num_kv_heads")
    if raw.get("multi_query_attention"):
        found = raw["multi_query_group_num"]
    number = int(found or config.num_heads)
    if number < 1 or config.num_heads % number:
        raise ValueError(f"{config.num_heads} query heads over {number} key/value heads")
    return number


def _inner(config: ModelConfig, raw: Mapping[str, Any], kind: str, file: Path) -> int:
    if kind == "mpt":
        return int(float(raw.get("expansion_ratio") or 4) * config.hidden_size)
    if any(raw.get(key) for key in ("intermediate_size", "n_inner", "ffn_dim")):
        return config.intermediate_size
    if raw.get("ffn_hidden_size"):
        return int(raw["ffn_hidden_size"])
    if kind in _BARE:
        return 4 * config.hidden_size
    raise ModelError(
        f"{file} does not describe its feed-forward: model_type is {kind!r}, and intermediate_size is missing"
    )


def _is_gated(raw: Mapping[str, Any], kind: str, file: Path) -> bool:
    """By the family where that is known, else by an activation that only gates have."""
    if kind in _BARE:
        return False
    named = {key: str(raw[key]) for key in _ACTIVATIONS if raw.get(key)}
    if kind in _GATED or next(iter(named.values()), "") in _GATING:
        return True
    found = " and ".join(f"{key} {value!r}" for key, value in named.items()) or "no hidden_act"
    raise ModelError(
        f"{file} has model_type {kind!r} and {found}, which does not tell whether its feed-forward has a gate; wanted: "
        f"a model_type of {', '.join(sorted(_BARE | _GATED))}, or an activation of {', '.join(_GATING)}"
    )


def _num_vectors(
    config: ModelConfig, raw: Mapping[str, Any], kind: str, queries_keys_values: int, inner: int
) -> int:
    hidden = config.hidden_size
    total = 2 * hidden + (2 * config.head_dim if config.qk_norm else 0)
    if kind in _BIASED and not any(raw.get(key) is False for key in ("use_bias", "enable_bias")):
        return total + 2 * hidden + queries_keys_values + hidden + inner + hidden
    return total + (queries_keys_values if config.qkv_bias else 0)


def _window(config: ModelConfig, raw: Mapping[str, Any], kind: str, file: Path) -> tuple[int | None, int]:
    """How many last positions windowed layers see, and how many layers these are."""
    windows = [window for window in config.windows if window is not None]
    if not windows or (kind.startswith(("qwen2", "qwen3")) and not raw.get("use_sliding_window")):
        return None, 0
    if raw.get("layer_types") or config.family is not None or kind in _WINDOWED:
        return min(windows), len(windows)
    if kind in _WINDOW_PERIODS:
        period = int(raw.get("sliding_window_pattern") or _WINDOW_PERIODS[kind])
        return min(windows), config.num_layers - config.num_layers // period
    pattern = raw.get("sliding_window_pattern")
    found = f"sliding_window {min(windows)}" + (f", sliding_window_pattern {pattern!r}" if pattern else "")
    raise ModelError(
        f"{file} has model_type {kind!r} and {found}, which does not tell which layers have it; wanted: layer_types"
    )


def _experts(raw: Mapping[str, Any]) -> Experts | None:
    """Mixtures as Mixtral, Qwen-MoE, gpt-oss and DeepSeek name them."""
    count = raw.get("num_local_experts") or raw.get("num_experts") or raw.get("n_routed_experts")
    if not count:
        return None
    inner = int(raw.get("moe_intermediate_size") or raw["intermediate_size"])
    shared = raw.get("shared_expert_intermediate_size") or int(raw.get("n_shared_experts") or 0) * inner
    per_token = raw.get("num_experts_per_tok") or raw["experts_per_token"]
    if not 1 <= int(per_token) <= int(count):
        raise ValueError(f"{per_token} of {count} experts for each token")
    return Experts(int(count), int(per_token), inner, int(shared), int(raw.get("first_k_dense_replace") or 0))


def _latent(raw: Mapping[str, Any]) -> LatentAttention | None:
    """DeepSeek's attention, by its names."""
    if not raw.get("kv_lora_rank"):
        return None
    return LatentAttention(
        int(raw.get("q_lora_rank") or 0),
        int(raw["kv_lora_rank"]),
        int(raw["qk_nope_head_dim"]),
        int(raw["qk_rope_head_dim"]),
        int(raw["v_head_dim"]),
    )
