"""The compiled stack gives what the decoder of single operations gives, with every option a family has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from twinpool.engine.batch import LayerGroupsDone
from twinpool.engine.model_config import ModelConfig, RopeConfig
from twinpool.engine.models import ignore_layer
from twinpool.engine.models.compiled_decoder import CompiledDecoder
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.models.packed_weights import pack_weights, packed_bytes
from twinpool.engine.weights import Weights
from twinpool.kernels.linear import quantized
from twinpool.kernels.paged_attention import PagedBatch
from twinpool.kernels.team import Team
from twinpool.layout import Dtype

BLOCK_SIZE = 8
PLAIN = ModelConfig(
    architecture="LlamaForCausalLM", model_type="llama", family="llama", num_layers=3, hidden_size=40, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=72, vocab_size=130, max_positions=128, rms_eps=1e-5,
    rope=RopeConfig(), tied_embeddings=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
    windows=(None, None, None), eos_token_ids=(0,), dtype=Dtype.FLOAT32,
)  # fmt: skip
CONFIGS = {
    "plain": PLAIN,
    "biases, own head": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True, tied_embeddings=False),
    "head norms, window": replace(PLAIN, qk_norm=True, windows=(5, None, 20)),
    "odd sizes": replace(PLAIN, hidden_size=39, intermediate_size=33, num_kv_heads=4, vocab_size=64),
}
LENGTHS = [(1, 1), (30, 30), (61, 1), (40, 3), (17, 17), (9, 1)]
"""Sequences of (all tokens, tokens of the step): decode, prompts and chunks."""


class RandomWeights(Weights):
    """Small random weights of any name and shape: the same for the same name."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(name))
        spread, middle = (0.3, 1.0) if name.endswith("norm.weight") else (shape[-1] ** -0.5, 0.0)
        return (torch.randn(shape, generator=generator) * spread + middle).to(self._dtype)


class RoundedWeights(RandomWeights):
    """Those, with the layers' matrices rounded as int8 weights are."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().get(name, shape)
        if tensor.dim() == 1 or "layers" not in name:
            return tensor
        scales, integers = quantized(tensor)
        return (integers * scales[:, None]).to(self._dtype)


def batch_of(lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, PagedBatch]:
    """Token ids that depend on nothing but sequence and position, and blocks one after the other."""
    ends, counts = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    sizes = -(-ends // BLOCK_SIZE)
    table_starts = np.concatenate(([0], np.cumsum(sizes)))
    positions = np.concatenate([np.arange(end - count, end) for end, count in lengths])
    first_slots = np.repeat(table_starts[:-1] * BLOCK_SIZE, counts)
    return torch.from_numpy((positions * 7 + 3) % 64), PagedBatch(
        query_starts=np.concatenate(([0], np.cumsum(counts))),
        ends=ends,
        block_tables=np.arange(sizes.sum()),
        table_starts=table_starts,
        slots=torch.from_numpy(first_slots + positions),
        positions=torch.from_numpy(positions),
    )


def pool_for(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (40, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_logits_and_kv_are_those_of_single_operations(
    config: ModelConfig, dtype: torch.dtype, tolerance: float
) -> None:
    """bfloat16 differs where the one rounds between gate and product and the other does not."""
    token_ids, batch = batch_of(LENGTHS)
    rows, layers = torch.arange(len(token_ids)), []
    kv, wanted_kv = pool_for(config, dtype), pool_for(config, dtype)
    whole = Decoder(config, RandomWeights(dtype), 128, torch.device("cpu"))
    wanted = whole.logits(whole.forward(token_ids, batch, wanted_kv, rows, ignore_layer))
    decoder = CompiledDecoder(config, RandomWeights(dtype), 128, dtype)
    found = decoder.logits(decoder.forward(token_ids, batch, kv, rows, layers.append))
    assert layers == [0, 1, 2]
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    assert (kv.float() - wanted_kv.float()).norm() <= tolerance * wanted_kv.float().norm()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_int8_weights_give_the_logits_of_the_weights_that_they_stand_for(
    config: ModelConfig, dtype: torch.dtype, tolerance: float
) -> None:
    token_ids, batch = batch_of(LENGTHS)
    rows = torch.arange(len(token_ids))
    whole = Decoder(config, RoundedWeights(dtype), 128, torch.device("cpu"))
    wanted = whole.logits(whole.forward(token_ids, batch, pool_for(config, dtype), rows, ignore_layer))
    decoder = CompiledDecoder(config, RandomWeights(dtype), 128, dtype, Team(2), as_integers=True)
    found = decoder.logits(decoder.forward(token_ids, batch, pool_for(config, dtype), rows, ignore_layer))
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    packed = pack_weights(config, RandomWeights(dtype), dtype, as_integers=True)
    assert packed_bytes(config, dtype, as_integers=True) == packed.flat.nbytes + packed.matrices.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_logits_to_the_bit_in_every_batch_and_chunking(dtype: torch.dtype) -> None:
    decoder = CompiledDecoder(PLAIN, RandomWeights(dtype), 128, dtype)

    def last_logits(kv: torch.Tensor, lengths: list[tuple[int, int]]) -> torch.Tensor:
        token_ids, batch = batch_of(lengths)
        rows = torch.from_numpy(batch.query_starts[1:] - 1)
        return decoder.logits(decoder.forward(token_ids, batch, kv, rows, ignore_layer))[0].clone()

    alone, crowded, chunked = (pool_for(PLAIN, dtype) for _ in range(3))
    wanted = last_logits(alone, [(45, 45)])
    assert torch.equal(last_logits(crowded, [(45, 45), (9, 9), (30, 2)]), wanted)
    for end, count in ((20, 20), (44, 24)):
        last_logits(chunked, [(end, count), (8, 8)])
    assert torch.equal(last_logits(chunked, [(45, 1)]), wanted)
    assert torch.equal(chunked[:5], alone[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_threads_give_what_one_gives_to_the_bit(dtype: torch.dtype) -> None:
    token_ids, batch = batch_of(LENGTHS)
    rows = torch.tensor([0, 5, 30, 31])
    results = []
    for size in (1, 2, 3):
        decoder, kv = (
            CompiledDecoder(PLAIN, RandomWeights(dtype), 128, dtype, Team(size)),
            pool_for(PLAIN, dtype),
        )
        hidden = decoder.forward(token_ids, batch, kv, rows, ignore_layer)
        results.append((decoder.logits(hidden).clone(), kv))
    for logits, kv in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(kv, results[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_of_many_rows_come_in_pieces_with_the_bits_that_they_have_alone(
    dtype: torch.dtype, num_threads: int
) -> None:
    """And take no memory that is kept."""
    decoder = CompiledDecoder(PLAIN, RandomWeights(dtype), 128, dtype, Team(num_threads))
    token_ids, batch = batch_of([(70, 70), (60, 31)])
    kept = len(decoder._buffers.logits)
    hidden = decoder.forward(token_ids, batch, pool_for(PLAIN, dtype), torch.arange(101), ignore_layer)
    pieces = [decoder.logits(hidden[first : first + 40]) for first in (0, 40, 80)]
    assert len(decoder._buffers.logits) == kept
    assert torch.equal(torch.cat(pieces), decoder.logits(hidden))
    last = torch.tensor([69, 100])
    alone = decoder.logits(decoder.forward(token_ids, batch, pool_for(PLAIN, dtype), last, ignore_layer))
    assert torch.equal(torch.cat(pieces)[last], alone)


def test_layers_of_a_group_are_final_when_its_last_is_told_and_none_is_told_before() -> None:
    token_ids, batch = batch_of(LENGTHS)
    rows = torch.arange(len(token_ids))
    decoder = CompiledDecoder(PLAIN, RandomWeights(torch.float32), 128, torch.float32)
    kv, wanted_kv = pool_for(PLAIN, torch.float32), pool_for(PLAIN, torch.float32)
    wanted = decoder.logits(decoder.forward(token_ids, batch, wanted_kv, rows, ignore_layer)).clone()
    told: list[int] = []

    def done(layer: int) -> None:
        told.append(layer)
        assert torch.equal(kv[:, : layer + 1], wanted_kv[:, : layer + 1])

    found = decoder.logits(
        decoder.forward(token_ids, batch, kv, rows, LayerGroupsDone(frozenset({1, 2}), done))
    )
    assert told == [1, 2]
    assert torch.equal(found, wanted)


def test_a_chunk_that_does_not_end_its_prompt_writes_kv_and_no_logits() -> None:
    decoder, kv, wanted = (
        CompiledDecoder(PLAIN, RandomWeights(torch.float32), 128, torch.float32),
        *(pool_for(PLAIN, torch.float32) for _ in range(2)),
    )
    token_ids, batch = batch_of([(12, 12)])
    hidden = decoder.forward(token_ids, batch, kv, torch.empty(0, dtype=torch.int64), ignore_layer)
    assert decoder.logits(hidden).shape == (0, 130)
    decoder.forward(token_ids, batch, wanted, torch.tensor([11]), ignore_layer)
    assert torch.equal(kv, wanted)


def test_a_token_that_is_not_in_the_vocabulary_is_refused() -> None:
    decoder = CompiledDecoder(PLAIN, RandomWeights(torch.float32), 128, torch.float32)
    _, batch = batch_of([(1, 1)])
    for token in (130, -1):
        with pytest.raises(IndexError, match=f"0 to 129; found .*{token}"):
            decoder.forward(
                torch.tensor([token]), batch, pool_for(PLAIN, torch.float32), torch.tensor([0]), ignore_layer
            )
