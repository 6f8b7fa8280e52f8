"""What `transformers` would answer in float32, without generating it again for every run.

A greedy answer is right if and only if each of its tokens is the best one after the tokens before it. So one forward
pass of the reference over prompt and answer together judges the whole answer: position by position, given that
answer's own beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

NEAR_TIE = 0.005
"""Where the reference's two best logits differ by less, rounding may decide between them."""

PROMPT_LENGTHS = (
    1, 2, 3, 5, 8, 15, 16, 17, 20, 26, 31, 32, 33, 40, 47, 48, 49, 55, 63, 64,
    65, 70, 79, 80, 81, 95, 100, 111, 112, 113, 127, 128, 129, 150, 200, 255, 256, 257, 600, 900,
)  # fmt: skip
"""40 lengths, many of them one less than, equal to, and one more than a multiple of the block size 16."""


def prompts(model_dir: Path, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[tuple[int, ...]]:
    """One prompt of real text per length, each from another place of it, so that no two share a first block."""
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return [tuple((ids * 2)[(i * 37) % 1000 :][:length]) for i, length in enumerate(lengths)]


@dataclass(frozen=True, slots=True)
class Judgement:
    """How an answer compares: the positions where the two best logits are a near tie, and the first wrong one."""

    near_ties: tuple[int, ...]
    fault: str = ""


class Reference:
    """The model in `transformers`, float32. Judges and scores each different answer once."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], Judgement] = {}
        self._scored: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        """Whether `answer` is the reference's greedy answer to `prompt`, up to near ties."""
        key = (tuple(prompt), tuple(answer))
        if key not in self._judged:
            self._judged[key] = self._judge(*key)
        return self._judged[key]

    @torch.inference_mode()
    def _judge(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Judgement:
        fed = torch.tensor([prompt + answer[:-1]])
        logits = self._model(input_ids=fed, use_cache=False, logits_to_keep=len(answer)).logits[0]
        best = logits.topk(2).values
        lead = best[:, 0] - best[:, 1]
        behind = best[:, 0] - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        near_ties = tuple((lead < NEAR_TIE).nonzero()[:, 0].tolist())
        for position in (behind >= NEAR_TIE).nonzero()[:1, 0].tolist():
            found, wanted = answer[position], int(logits[position].argmax())
            fault = (
                f"prompt of {len(prompt)} tokens: output token {position} is {found}, whose logit is "
                f"{float(behind[position]):.4f} behind that of {wanted}"
            )
            return Judgement(near_ties, fault)
        return Judgement(near_ties)

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """The log probability of each token of `answer` after the tokens before it."""
        key = (tuple(prompt), tuple(answer))
        if key not in self._scored:
            self._scored[key] = self._score(*key)
        return self._scored[key]

    @torch.inference_mode()
    def _score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[float]:
        fed = torch.tensor([prompt + answer[:-1]])
        logits = self._model(input_ids=fed, use_cache=False, logits_to_keep=len(answer)).logits[0]
        chosen = logits.double().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        found: list[float] = chosen[:, 0].tolist()
        return found
