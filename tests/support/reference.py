"""What `transformers` answers in float32: the tokens that every path of Twinpool must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

NEAR_TIE = 0.005
"""Where the reference's two best logits differ by less, rounding may decide."""

PROMPT_LENGTHS = (
    1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 150, 200, 255,
    256, 257, 300, 350, 383, 384, 385, 450, 511, 512, 513, 700, 777, 1023, 1025, 1500,
)  # fmt: skip
"""40 lengths, many of them one less than, equal to, and one more than a multiple of the block size 16."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's greedy tokens for one prompt, and the first position whose choice is a near tie (or None)."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    near_tie: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a run was compared: all tokens, or up to the first near tie of a prompt."""

    num_compared: int
    num_near_ties: int


def prompts(model_dir: Path, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[tuple[int, ...]]:
    """One prompt of real text per length, each from another place of the text, so that no two share a first block."""
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    ids = ids * 2
    return [tuple(ids[(i * 37) % 1000 :][:length]) for i, length in enumerate(lengths)]


def greedy(model_dir: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Expected]:
    """`num_tokens` greedy tokens after each prompt by `transformers` in float32, end-of-text ignored."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    return [_greedy(model, tuple(prompt), num_tokens) for prompt in prompts]


@torch.inference_mode()
def _greedy(model: torch.nn.Module, prompt: tuple[int, ...], num_tokens: int) -> Expected:
    cache, fed = None, torch.tensor([prompt])
    tokens: list[int] = []
    near_tie: int | None = None
    for position in range(num_tokens):
        result = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        best = result.logits[0, -1].topk(2)
        if near_tie is None and float(best.values[0] - best.values[1]) < NEAR_TIE:
            near_tie = position
        tokens.append(int(best.indices[0]))
        fed = torch.tensor([[tokens[-1]]])
    return Expected(prompt, tuple(tokens), near_tie)


def assert_equal(expected: Sequence[Expected], found: Sequence[Sequence[int]]) -> Comparison:
    """Asserts that each found answer equals the reference's, up to its first near tie; counts what was compared."""
    compared = ties = 0
    for want, got in zip(expected, found, strict=True):
        assert len(got) == len(want.token_ids), f"{len(got)} tokens instead of {len(want.token_ids)}"
        differs = next((i for i, (a, b) in enumerate(zip(want.token_ids, got, strict=True)) if a != b), None)
        if differs is not None:
            near_tie = len(got) if want.near_tie is None else want.near_tie
            assert differs >= near_tie, (
                f"prompt of {len(want.prompt)} tokens: output token {differs} is {got[differs]}, "
                f"transformers says {want.token_ids[differs]} (first near tie: {want.near_tie})"
            )
            ties += 1
        compared += len(got) if differs is None else differs
    return Comparison(compared, ties)
