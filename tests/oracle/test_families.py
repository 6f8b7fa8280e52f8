"""Our logits are transformers' logits, for every family, however the tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.tiny_models import (
    TINY,
    load_runner,
    piece,
    reference_logits,
    save_tiny_model,
    step,
    tokens,
)

from twinpool.engine.model_runner import ModelRunner
from twinpool.errors import ModelError

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

OWN: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "llama-yarn-rope": lambda: transformers.LlamaConfig(**TINY, rope_parameters=YARN_ROPE),
    "llama-linear-rope": lambda: transformers.LlamaConfig(**TINY, rope_parameters=LINEAR_ROPE),
    "llama-all-biases": lambda: transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**TINY, sliding_window=21),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=19, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
}
FOREIGN: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=131, n_embd=48, n_layer=3, n_head=4, n_positions=256, eos_token_id=2, bos_token_id=1
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**TINY, "num_key_value_heads": 6}, rotary_pct=0.5),
    "phi3": lambda: transformers.Phi3Config(**TINY),
    "olmo2": lambda: transformers.Olmo2Config(**TINY),
    "gemma": lambda: transformers.GemmaConfig(**TINY, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY, head_dim=8, sliding_window=17, query_pre_attn_scalar=20, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=17),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4),
    "starcoder2": lambda: transformers.Starcoder2Config(**TINY),
    "granite": lambda: transformers.GraniteConfig(**TINY, attention_multiplier=0.3, logits_scaling=2.0),
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=[*OWN, *FOREIGN])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    """A runner, and the same model in transformers."""
    name: str = request.param
    directory: Path = tmp_path_factory.mktemp(name)
    model = save_tiny_model(directory, (OWN | FOREIGN)[name]())
    runner = load_runner(directory)
    assert (runner.model_config.family is None) == (name in FOREIGN)
    return runner, model


def blocks(runner: ModelRunner, *lengths: int) -> list[list[int]]:
    """Block tables for sequences of these lengths, scattered over the pool."""
    order: list[int] = torch.randperm(runner.num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    tables = []
    for length in lengths:
        count = runner.layout.num_blocks(length)
        tables.append([order.pop() for _ in range(count)])
    return tables


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 101])
def test_a_whole_prompt_gives_the_reference_logits(pair: tuple[ModelRunner, Any], length: int) -> None:
    runner, model = pair
    ids = tokens(length)
    (table,) = blocks(runner, length)
    torch.testing.assert_close(
        runner.logits(step(piece("a", ids, 0, table))), reference_logits(model, ids), **TOLERANCE
    )


@pytest.mark.parametrize("chunks", [(1, 1, 99), (7, 8, 9, 13, 64), (50, 51), (33, 3, 40, 25)])
def test_awkward_chunks_give_the_reference_logits(
    pair: tuple[ModelRunner, Any], chunks: tuple[int, ...]
) -> None:
    runner, model = pair
    ids = tokens(sum(chunks), seed=1)
    (table,) = blocks(runner, len(ids))
    start, found = 0, []
    for size in chunks:
        found.append(runner.logits(step(piece("a", ids[start : start + size], start, table))))
        start += size
    torch.testing.assert_close(torch.cat(found), reference_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("prompt", [15, 16, 17])
def test_decoding_step_by_step_gives_the_reference_logits(pair: tuple[ModelRunner, Any], prompt: int) -> None:
    runner, model = pair
    ids = tokens(prompt + 18, seed=2)
    (table,) = blocks(runner, len(ids))
    found = [runner.logits(step(piece("a", ids[:prompt], 0, table)))]
    found += [runner.logits(step(piece("a", [ids[at]], at, table))) for at in range(prompt, len(ids))]
    torch.testing.assert_close(torch.cat(found), reference_logits(model, ids), **TOLERANCE)


def test_a_mixed_step_of_many_sequences_gives_each_its_own_logits(pair: tuple[ModelRunner, Any]) -> None:
    runner, model = pair
    plan = [
        (30, 1),
        (8, 1),
        (64, 1),
        (0, 25),
        (16, 40),
        (41, 3),
        (0, 1),
    ]  # (tokens before, tokens in the step)
    sequences = [tokens(before + now, seed=10 + i) for i, (before, now) in enumerate(plan)]
    tables = blocks(runner, *(len(ids) for ids in sequences))
    for i, (before, _) in enumerate(plan):
        if before:
            runner.logits(step(piece(str(i), sequences[i][:before], 0, tables[i])))
    mixed = step(
        *(piece(str(i), sequences[i][before:], before, tables[i]) for i, (before, _) in enumerate(plan))
    )
    wanted = [reference_logits(model, ids)[before:] for ids, (before, _) in zip(sequences, plan, strict=True)]
    torch.testing.assert_close(runner.logits(mixed), torch.cat(wanted), **TOLERANCE)


def test_each_layer_is_reported_once_in_order_with_its_kv_final(pair: tuple[ModelRunner, Any]) -> None:
    runner, _ = pair
    ids = tokens(19, seed=4)
    (table,) = blocks(runner, len(ids))
    seen: list[tuple[int, torch.Tensor]] = []
    batch = step(piece("a", ids, 0, table, temperature=0.0))
    runner.run(batch, lambda layer: seen.append((layer, runner.kv[table, layer].clone())))
    assert [layer for layer, _ in seen] == list(range(runner.layout.num_layers))
    for layer, at_report in seen:
        assert torch.equal(at_report, runner.kv[table, layer])


def test_greedy_tokens_are_the_reference_tokens(pair: tuple[ModelRunner, Any]) -> None:
    runner, model = pair
    ids = tokens(13, seed=5)
    (table,) = blocks(runner, len(ids) + 12)
    batch = step(piece("a", ids, 0, table, temperature=0.0))
    for _ in range(12):
        ((_, token),) = runner.run(batch).token_ids.items()
        assert token == int(reference_logits(model, ids)[-1].argmax())
        batch = step(piece("a", [token], len(ids), table, temperature=0.0))
        ids.append(token)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_bfloat16_stays_as_near_as_transformers_own_bfloat16(name: str, tmp_path: Path) -> None:
    """Both round at every operation, in different places: neither may be much farther from float32 than the other."""
    model = save_tiny_model(tmp_path, (OWN | FOREIGN)[name](), dtype=torch.bfloat16)
    runner = load_runner(tmp_path, dtype="bfloat16")
    ids = tokens(90, seed=6)
    (table,) = blocks(runner, len(ids))
    found = torch.cat(
        [runner.logits(step(piece("a", ids[a:b], a, table))) for a, b in ((0, 60), (60, 89), (89, 90))]
    )
    theirs = reference_logits(model, ids)
    exact = reference_logits(model.float(), ids)
    assert (found - exact).norm() < 1.5 * (theirs - exact).norm() + 1e-3 * exact.norm()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (lambda: transformers.BloomConfig(vocab_size=131, hidden_size=48, n_layer=2, n_head=4), "bloom"),
    "gpt_oss": (
        lambda: transformers.GptOssConfig(**TINY, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "sinks",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=131, hidden_size=48, num_hidden_layers=2), "num_attention_heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_paged_attention_cannot_do_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, wanted = REFUSED[name]
    save_tiny_model(tmp_path, make())
    with pytest.raises(ModelError, match=wanted):
        load_runner(tmp_path, max_model_len=128)
