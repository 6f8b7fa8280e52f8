"""What a model's config.json says about its shape. No torch: the CLI and the planner read this too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.config import require
from twinpool.errors import ModelError
from twinpool.layout import COMPUTE_DTYPES, Dtype, KVLayout

OWN_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures that run on Twinpool's own decoder; any other goes through transformers."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ALIASES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx"),
    "vocab_size": ("padded_vocab_size",),
}
_DEFAULT_MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become rotations.

    `kind` is default, linear, llama3 or yarn (or, on models that run through transformers, theirs). The other
    numbers are those of the kind, named as in config.json; None where the kind has no such number.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, in elements and counts.

    `family` is the own family's name, or None for a model that runs through transformers. `windows[layer]` is
    the number of last positions (its own included) that a query of that layer sees, None for all.
    `eos_token_ids` joins config.json and generation_config.json. `dtype` is what the weights were saved as.
    """

    architecture: str
    model_type: str
    family: str | None
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: Dtype

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Reads `path`/config.json and, if there, generation_config.json.

        Raises:
            ModelError: a file is absent or no JSON, or a needed number is missing or makes no sense.
        """
        directory = Path(path)
        top = _read_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        raw = {**top, **top["text_config"]} if isinstance(top.get("text_config"), dict) else top
        try:
            return _build(top, raw, generation)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
            raise ModelError(
                f"{directory / 'config.json'} does not describe a decoder: {_sentence(exc)}"
            ) from exc

    def context(self, max_model_len: int | None) -> int:
        """Tokens of the longest sequence: `max_model_len`, or without it the model's own context.

        Raises:
            ConfigError: the model was not made for so many.
        """
        longest = self.max_positions
        wanted = longest if max_model_len is None else max_model_len
        require("--max-model-len", wanted, 2 <= wanted <= longest, f"2 to {longest}, the model's context")
        return wanted

    def kv_layout(self, block_size: int, dtype: Dtype) -> KVLayout:
        """The KV blocks of this model: `block_size` token slots each, elements of `dtype`."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)


def _build(top: Mapping[str, Any], raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architectures = top.get("architectures") or [str(top["model_type"])]
    architecture = str(architectures[0])
    num_layers = int(_need(raw, "num_hidden_layers"))
    num_heads = int(_need(raw, "num_attention_heads"))
    hidden_size = int(_need(raw, "hidden_size"))
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_layers < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_layers} layers, {num_heads} query heads over {num_kv_heads} key/value heads")
    rope = _rope(raw)
    family = OWN_FAMILIES.get(architecture)
    rotary_share = _rope_numbers(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    usual = (
        raw.get("hidden_act", "silu") == "silu" and rope.kind in _ROPE_TYPES and float(rotary_share) == 1.0
    )
    if not usual or "quantization_config" in top:
        family = None
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        model_type=str(top.get("model_type", "")),
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=int(_find(raw, "intermediate_size") or 4 * hidden_size),
        vocab_size=int(_need(raw, "vocab_size")),
        max_positions=int(_find(raw, "max_position_embeddings") or _DEFAULT_MAX_POSITIONS),
        rms_eps=float(raw.get("rms_norm_eps") or 1e-6),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", top.get("tie_word_embeddings", family is None))),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, num_layers),
        eos_token_ids=_eos(top, raw, generation),
        dtype=_dtype(top, raw),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(
            f"{path} cannot be read ({exc.strerror}); a model directory has a config.json"
        ) from exc
    except ValueError as exc:
        raise ModelError(f"{path} is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; a model's configuration is an object")
    return value


def _sentence(exc: Exception) -> str:
    return f"{exc.args[0]!r} is missing" if isinstance(exc, KeyError) else str(exc)


def _find(raw: Mapping[str, Any], key: str) -> Any:
    return next((raw[name] for name in (key, *_ALIASES.get(key, ())) if raw.get(name) is not None), None)


def _need(raw: Mapping[str, Any], key: str) -> Any:
    value = _find(raw, key)
    if value is None:
        raise KeyError(key)
    return value


def _rope_numbers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters`, or its older name `rope_scaling` (then `rope_theta` stands beside it)."""
    numbers: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return numbers


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    scaling = _rope_numbers(raw)
    optional = {key: scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    original = scaling.get("original_max_position_embeddings") or _find(raw, "max_position_embeddings")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        kind=str(scaling.get("rope_type") or scaling.get("type") or "default"),
        factor=float(scaling.get("factor") or 1.0),
        original_max_positions=None if original is None else int(original),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        **{key: None if value is None else float(value) for key, value in optional.items()},
    )


def _windows(raw: Mapping[str, Any], family: str | None, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Qwen's window is off unless `use_sliding_window`, and spares the first layers."""
    window = raw.get("sliding_window")
    if not window or raw.get("use_sliding_window") is False:
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise ValueError(f"{len(layer_types)} layer_types for {num_layers} layers")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    if family in ("qwen2", "qwen3"):
        if not raw.get("use_sliding_window"):
            return (None,) * num_layers
        first = int(raw.get("max_window_layers", 28))
        return tuple(int(window) if layer >= first else None for layer in range(num_layers))
    return (int(window) if family == "mistral" or family is None else None,) * num_layers


def _eos(top: Mapping[str, Any], raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation, top, raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [int(value)]
    return tuple(dict.fromkeys(ids))


def _dtype(top: Mapping[str, Any], raw: Mapping[str, Any]) -> Dtype:
    name = (
        raw.get("dtype") or raw.get("torch_dtype") or top.get("dtype") or top.get("torch_dtype") or "float32"
    )
    name = str(name).removeprefix("torch.")
    return Dtype(name) if name in COMPUTE_DTYPES else Dtype.FLOAT32
