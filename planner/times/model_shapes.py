"""What a model's shape says of a step: weights to read, FLOPs to compute, KV to keep. Of well-known models by name;
`config_shapes.py` reads others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinpool.errors import ConfigError, ModelError
from twinpool.layout import Dtype, KVLayout


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in place of one feed-forward: `count` experts of `inner` elements, of which a token takes
    `per_token`; `shared_inner` of one that every token takes, too. The first `num_dense_layers` have none."""

    count: int
    per_token: int
    inner: int
    shared_inner: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values as one compressed vector per token and layer (MLA, DeepSeek-V2, arXiv 2405.04434), in elements.

    Kept is `rank` + `rope_dim` per token. Chunks attend with heads of `nope_dim` + `rope_dim` to values of `value_dim`;
    single tokens in the compressed space. Queries are compressed to `query_rank`, too; 0: they are not.
    """

    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape, in elements and counts.

    `inner` is the width of a dense feed-forward, of three matrices if `is_gated`, else of two. `window` is how many
    last positions a query sees in `num_window_layers` of the layers. `num_vectors` are the weights of a layer in no
    matrix (biases, norms), `num_positions` learned positions. `quantization` is by which method a config.json says that
    weights are quantized. `source` is where the figures are from.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_positions: int
    source: str
    is_gated: bool = True
    tied_embeddings: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: int | None = None
    num_window_layers: int = 0
    num_vectors: int = 0
    num_positions: int = 0
    quantization: str | None = None

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's matrices around attention: queries, keys, values, output."""
        if self.latent is None:
            return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden
        mla = self.latent
        queries = self.num_heads * (mla.nope_dim + mla.rope_dim) * (mla.query_rank or self.hidden)
        queries += mla.query_rank * self.hidden
        keys = self.hidden * (mla.rank + mla.rope_dim) + mla.rank * self.num_heads * (
            mla.nope_dim + mla.value_dim
        )
        return queries + keys + self.num_heads * mla.value_dim * self.hidden

    def feed_forward_weights(self, inner: int) -> int:
        """Weights of a feed-forward of `inner` elements."""
        return (3 if self.is_gated else 2) * self.hidden * inner

    @property
    def num_expert_layers(self) -> int:
        """Layers that have experts."""
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def expert_weights(self) -> int:
        """Weights of one expert of one layer; 0 without experts."""
        return 0 if self.experts is None else self.feed_forward_weights(self.experts.inner)

    @property
    def shared_weights(self) -> int:
        """Weights of all layers that every token uses: all but routed experts, embeddings and head."""
        total = self.num_layers * (self.attention_weights + self.num_vectors)
        total += (self.num_layers - self.num_expert_layers) * self.feed_forward_weights(self.inner)
        if self.experts is not None:
            routed = self.feed_forward_weights(self.experts.shared_inner) + self.hidden * self.experts.count
            total += self.num_expert_layers * routed
        return total

    @property
    def head_weights(self) -> int:
        """Weights of the matrix that makes logits."""
        return self.hidden * self.vocab

    @property
    def num_parameters(self) -> int:
        """All weights."""
        embeddings = self.head_weights * (1 if self.tied_embeddings else 2) + self.hidden * self.num_positions
        routed = 0 if self.experts is None else self.experts.count * self.expert_weights
        return self.shared_weights + self.num_expert_layers * routed + embeddings + self.hidden

    @property
    def active_weights(self) -> int:
        """Weights of all layers that one token is multiplied with."""
        routed = 0 if self.experts is None else self.experts.per_token * self.expert_weights
        return self.shared_weights + self.num_expert_layers * routed

    @property
    def kv_elements(self) -> int:
        """Elements of KV per token, of all layers: 2 × layers × KV heads × head size."""
        if self.latent is not None:
            return self.num_layers * (self.latent.rank + self.latent.rope_dim)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_layout(self, block_size: int, dtype: Dtype) -> KVLayout:
        """The KV blocks: `block_size` token slots each, elements of `dtype`. MLA's one vector per token and layer is
        laid out as two halves of itself."""
        if self.latent is not None:
            half = (self.latent.rank + self.latent.rope_dim) // 2
            return KVLayout(self.num_layers, 1, half, block_size, dtype)
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)

    def weight_bytes(self, bytes_each: float) -> float:
        """Bytes of all weights at `bytes_each`, embeddings, head and vectors in 16 bits at least (quantized models
        leave these as they were)."""
        matrices = self.num_layers * self.attention_weights
        matrices += (self.num_layers - self.num_expert_layers) * self.feed_forward_weights(self.inner)
        if self.experts is not None:
            shared = self.feed_forward_weights(self.experts.shared_inner)
            matrices += self.num_expert_layers * (shared + self.experts.count * self.expert_weights)
        return matrices * bytes_each + (self.num_parameters - matrices) * max(bytes_each, 2.0)

    def prompt_pair_flops(self) -> float:
        """FLOPs of one (query, key) pair of a chunk, in one layer: a multiplication and an addition for each element
        of a key and of a value, for each query head."""
        if self.latent is None:
            return 4.0 * self.num_heads * self.head_dim
        mla = self.latent
        return 2.0 * self.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)

    def sequence_pair_flops(self) -> float:
        """FLOPs of one (query, key) pair of a single token, in one layer."""
        if self.latent is None:
            return 4.0 * self.num_heads * self.head_dim
        return 2.0 * self.num_heads * (2 * self.latent.rank + self.latent.rope_dim)


def _known(*shapes: ModelShape) -> dict[str, ModelShape]:
    return {shape.name: shape for shape in shapes}


_LLAMA = "config.json of meta-llama"
_OPT = "Zhang et al., OPT (arXiv 2205.01068), table 1, and config.json of facebook"


def _opt(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    """OPT: two matrices of 4 × hidden, biases, learned positions, tied embeddings."""
    return ModelShape(
        name,
        num_layers,
        hidden,
        num_heads,
        num_heads,
        hidden // num_heads,
        4 * hidden,
        50_272,
        2_048,
        f"{_OPT}/{name}",
        is_gated=False,
        tied_embeddings=True,
        num_vectors=13 * hidden,  # biases 4 + 4 + 1, norms 2 × 2
        num_positions=2_050,
    )


SHAPES = _known(
    ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1_536, 49_152, 8_192,
               "config.json of HuggingFaceTB/SmolLM2-135M-Instruct", tied_embeddings=True, num_vectors=2 * 576),
    ModelShape("llama-3.1-8b", 32, 4_096, 32, 8, 128, 14_336, 128_256, 131_072,
               f"{_LLAMA}/Llama-3.1-8B", num_vectors=2 * 4_096),
    ModelShape("llama-3.1-70b", 80, 8_192, 64, 8, 128, 28_672, 128_256, 131_072,
               f"{_LLAMA}/Llama-3.1-70B", num_vectors=2 * 8_192),
    ModelShape("llama-3.1-405b", 126, 16_384, 128, 8, 128, 53_248, 128_256, 131_072,
               f"{_LLAMA}/Llama-3.1-405B", num_vectors=2 * 16_384),
    ModelShape("llama-2-70b", 80, 8_192, 64, 8, 128, 28_672, 32_000, 4_096,
               f"{_LLAMA}/Llama-2-70b-hf", num_vectors=2 * 8_192),
    _opt("opt-13b", 40, 5_120, 40),
    _opt("opt-66b", 64, 9_216, 72),
    _opt("opt-175b", 96, 12_288, 96),
    ModelShape("bloom-176b", 70, 14_336, 112, 112, 128, 57_344, 250_880, 2_048,
               "config.json of bigscience/bloom", is_gated=False, tied_embeddings=True, num_vectors=13 * 14_336),
    ModelShape("qwen3-8b", 36, 4_096, 32, 8, 128, 12_288, 151_936, 40_960,
               "config.json of Qwen/Qwen3-8B", num_vectors=2 * 4_096 + 2 * 128),
    ModelShape("qwen3-32b", 64, 5_120, 64, 8, 128, 25_600, 151_936, 40_960,
               "config.json of Qwen/Qwen3-32B", num_vectors=2 * 5_120 + 2 * 128),
    ModelShape("qwen3-235b-a22b", 94, 4_096, 64, 4, 128, 12_288, 151_936, 40_960,
               "config.json of Qwen/Qwen3-235B-A22B", experts=Experts(128, 8, 1_536),
               num_vectors=2 * 4_096 + 2 * 128),
    ModelShape("mixtral-8x7b", 32, 4_096, 32, 8, 128, 14_336, 32_000, 32_768,
               "config.json of mistralai/Mixtral-8x7B-v0.1", experts=Experts(8, 2, 14_336),
               num_vectors=2 * 4_096),
    ModelShape("gpt-oss-120b", 36, 2_880, 64, 8, 64, 2_880, 201_088, 131_072,
               "config.json of openai/gpt-oss-120b", experts=Experts(128, 4, 2_880), window=128,
               num_window_layers=18, num_vectors=2 * 2_880),
    ModelShape("deepseek-v3", 61, 7_168, 128, 128, 128, 18_432, 129_280, 163_840,
               "config.json of deepseek-ai/DeepSeek-V3", experts=Experts(256, 8, 2_048, 2_048, 3),
               latent=LatentAttention(1_536, 512, 128, 64, 128), num_vectors=2 * 7_168),
    ModelShape("kimi-k2", 61, 7_168, 64, 64, 128, 18_432, 163_840, 131_072,
               "config.json of moonshotai/Kimi-K2-Instruct", experts=Experts(384, 8, 2_048, 2_048, 1),
               latent=LatentAttention(1_536, 512, 128, 64, 128), num_vectors=2 * 7_168),
    ModelShape("minimax-m2", 62, 3_072, 48, 8, 128, 1_536, 200_064, 196_608,
               "config.json of MiniMaxAI/MiniMax-M2", experts=Experts(256, 8, 1_536), num_vectors=2 * 3_072),
)  # fmt: skip
"""Well-known models by what `--model` calls them."""
_ALIASES = {
    "llama2-70b": "llama-2-70b",
    "llama-2-70b-hf": "llama-2-70b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "kimi-k2.5": "kimi-k2",
    "minimax-m2.5": "minimax-m2",
    "smollm2-135m-instruct": "smollm2-135m",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "bloom": "bloom-176b",
}


_QUANTIZED = ("fp8", "nvfp4")


def known_shape(text: str) -> ModelShape | None:
    """The well-known model that `text` names, with or without its owner and what it was tuned for; None if none."""
    name = text.strip().lower().rsplit("/", 1)[-1]
    for ending in ("", "-fp8", "-nvfp4", "-base", "-instruct", "-instruct-fp8"):
        short = name.removesuffix(ending)
        if (short := _ALIASES.get(short, short)) in SHAPES:
            return SHAPES[short]
    return None


def named_quantization(text: str) -> str | None:
    """What the name of a well-known model says that weights are quantized to: fp8 or nvfp4. None where it says nothing,
    or where a directory's config.json does."""
    if (Path(text) / "config.json").is_file() or known_shape(text) is None:
        return None
    said = text.strip().lower().rsplit("-", 1)[-1]
    return said if said in _QUANTIZED else None


def model_shape(text: str) -> ModelShape:
    """The model that `--model` means: a directory with a config.json, a well-known name, or the id of a model whose
    files are here.

    Raises:
        ConfigError: it is none of them.
        ModelError: its config.json does not describe a decoder, or one that is not planned for.
    """
    # Here, as that module builds on this one.
    from twinpool.planner.times.config_shapes import of_directory

    if (Path(text) / "config.json").is_file():
        return of_directory(text)
    if (known := known_shape(text)) is not None:
        return known
    from twinpool.engine.model_files import resolve

    try:
        model = resolve(text, needs_weights=False)
    except ModelError as exc:
        raise ConfigError(
            f"--model is {text!r}; allowed: {', '.join(SHAPES)}, a directory with a config.json, or a model that is "
            f"here ({exc})"
        ) from exc
    return of_directory(model.path, model.name)
