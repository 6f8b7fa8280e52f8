"""A whole decoder on the GPU's kernels, through the same lines that choose them for CUDA tensors, gives the tokens that
it gives on the CPU's: in Triton's interpreter where there is no GPU (tests/gpu does it where there is one)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.made_matcher import ANY, MadeMatcher
from support.tiny_models import piece, tokens
from support.triton_device import DEVICE

from twinpool.bench.engine.made_models import MadeShape, make_model
from twinpool.engine.batch import SequenceSlice
from twinpool.engine.gpu.step_inputs import Room, StepInputs
from twinpool.engine.host_inputs import HostInputs
from twinpool.engine.look_back import LookBack
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.sampler import Chosen, StepSampling
from twinpool.engine.weights import Weights
from twinpool.kernels.gpu import paged_attention as gpu_attention
from twinpool.request import Job, SamplingParams

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu runs the whole engine on this GPU")
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 8
SHAPE = MadeShape(
    num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=16, vocab_size=1100, qk_norm=True
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = make_model(tmp_path_factory.mktemp("model"), SHAPE)
    config = ModelConfig.from_dir(directory)
    with torch.inference_mode(), Weights(directory, torch.float32, CPU) as weights:
        return Decoder(config, weights, 128, CPU)


@contextmanager
def taken_for_cuda() -> Iterator[None]:
    """Main memory passes for a GPU's, and the interpreter for a GPU of two multiprocessors. New memory is full of what
    is not a number, so a kernel that reads what none has written shows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(gpu_attention, "_num_sms", lambda _device: 2)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def a_step(prompts: list[list[int]], start: int, end: int) -> list[SequenceSlice]:
    """Tokens [start, end) of each prompt, the first of which is sampled greedily, and not from the model's logits."""
    slices = [
        piece(
            str(i), ids[start:end], start, range(4 * i, 4 * i + 4), temperature=i % 2 * 0.8, top_p=0.9, seed=i,
            logit_bias=((7, 3.5), (8, 9.0), (1100, 9.0)) if i == 0 else (), logprobs=3 - i,
            repetition_penalty=1.4 if i == 0 else 1.0, grammar=ANY if i == 0 else None,
        )
        for i, ids in enumerate(prompts)
    ]  # fmt: skip
    job = Job("0", 0, (*prompts[0], 6), slices[0].sampling or SamplingParams(9, 0), (), 1)
    return [replace(slices[0], look_back=LookBack(job)), *slices[1:]]


def choose(logits: torch.Tensor, slices: list[SequenceSlice]) -> Chosen:
    """The tokens after the slices, the first of which may have one of every third token; changes the logits."""
    return StepSampling(slices, lambda _grammar: MadeMatcher(SHAPE.vocab_size)).choose(logits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at work on what is not a number
@torch.inference_mode()
def test_chunks_and_decodes_among_padding_give_the_cpus_tokens(model: Decoder) -> None:
    prompts = [tokens(8, seed=i, vocab_size=SHAPE.vocab_size) for i in range(2)]
    pool = torch.randn(NUM_BLOCKS, SHAPE.num_layers, 2, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim) * 9
    pools = pool.clone(), pool.clone()
    for start, end in ((0, 5), (5, 7), (7, 8)):
        slices = a_step(prompts, start, end)
        rows = np.arange(1, 3) * (end - start) - 1
        token_ids, batch = HostInputs(BLOCK_SIZE).pack(slices)
        hidden = model.forward(token_ids, batch, pools[0], torch.from_numpy(rows), lambda _layer: None)
        logits = model.logits(hidden)
        wanted = choose(logits, slices)
        assert logits.isfinite().sum(1).tolist() == [367, 1100]
        num_decodes = 3 if end - start == 1 else 0  # a decode step is padded, as for a graph
        room = Room(2 * (end - start) + 1, 3, 4, 3)
        inputs = StepInputs(room, BLOCK_SIZE, CPU, num_decodes=num_decodes, most_queries=end - start)
        inputs.fill(slices, rows)
        with taken_for_cuda():
            found = model.forward(inputs.token_ids, inputs.batch, pools[1], inputs.rows, lambda _layer: None)
            found_logits = model.logits(found)[:2]
            chosen = choose(found_logits, slices)
        assert chosen.token_ids == wanted.token_ids
        assert chosen.failed == wanted.failed == {}
        for key, told in wanted.logprobs.items():
            assert chosen.logprobs[key].logprob == pytest.approx(told.logprob, abs=1e-4)
            assert [token for token, _ in chosen.logprobs[key].top] == [token for token, _ in told.top]
        torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pools[1], pools[0], rtol=1e-4, atol=1e-4)
