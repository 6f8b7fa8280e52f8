"""What a format of the weights costs in quality: perplexity of a fixed text, and how soon greedy answers are others.

    python -m twinpool.bench.engine.quality [--model MODEL] [--tokens N] [--prompts N] [--json FILE]

The text is Python's own manual as every Python has it (`pydoc_data.topics`, in order of the topics' names); versions
differ, so its digest is printed. All formats are held against the first, which rounds nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

from twinpool.config import EngineConfig
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.model_files import resolve
from twinpool.engine.model_runner import ModelRunner
from twinpool.engine.tokenizer import Tokenizer
from twinpool.request import RequestKey, SamplingParams

FORMATS = (("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "int8"))
"""(--dtype, --weights); the first is what the others are held against."""
ANSWER_TOKENS = 64
PROMPT_TOKENS = 32
_CHUNK = 256
_BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Output:
    """What one format makes of a text: its perplexity, the likeliest token after each of its tokens, and the greedy
    answers to the prompts."""

    perplexity: float
    likeliest: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """One format beside another: shares are of 1; `first_difference` is the median place in an answer, from 1 on, of
    those answers that differ, None if none does."""

    perplexity: float
    likeliest_equal: float
    answer_tokens_equal: float
    answers_equal: float
    first_difference: float | None


def measure(
    directory: Path, dtype: str, weights: str, token_ids: Sequence[int], prompts: Sequence[Sequence[int]]
) -> Output:
    """Runs the model at `directory` on a CPU over the text `token_ids`, at least two, and answers the prompts.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: it is not run in this format here.
    """
    runner = _load(directory, dtype, weights, len(token_ids), prompts)
    losses, likeliest = 0.0, list[int]()
    for start in range(0, len(token_ids), _CHUNK):
        chunk = token_ids[start : start + _CHUNK]
        batch = StepBatch(
            (SequenceSlice(RequestKey("text", 0), chunk, start, _table(runner, 0, len(token_ids))),)
        )
        logits = runner.logits(batch)
        following = torch.tensor(token_ids[start + 1 : start + _CHUNK + 1])
        losses += float(
            torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum")
        )
        likeliest += logits.argmax(1).tolist()
    return Output(math.exp(losses / (len(token_ids) - 1)), tuple(likeliest), _answers(runner, prompts))


def compare(found: Output, wanted: Output) -> Quality:
    """`found` beside `wanted`, of the same text and prompts."""
    pairs = list(zip(found.answers, wanted.answers, strict=True))
    differences = [
        next((place for place, (a, b) in enumerate(zip(*pair, strict=True), 1) if a != b), None)
        for pair in pairs
    ]
    places = [place for place in differences if place is not None]
    return Quality(
        perplexity=found.perplexity,
        likeliest_equal=_share_equal(found.likeliest, wanted.likeliest),
        answer_tokens_equal=statistics.fmean(_share_equal(*pair) for pair in pairs),
        answers_equal=1 - len(places) / len(pairs),
        first_difference=statistics.median(places) if places else None,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="id, directory or .gguf file (default: the built-in model)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text")
    parser.add_argument("--prompts", type=int, default=32, help=f"each answered with {ANSWER_TOKENS} tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures too")
    args = parser.parse_args(argv)
    directory = resolve(args.model).path
    text = "\n\n".join(topics[name] for name in sorted(topics))
    all_ids = Tokenizer.from_dir(directory).encode(text, add_special_tokens=False)
    token_ids = all_ids[: args.tokens]
    first, last = len(token_ids), len(all_ids) - PROMPT_TOKENS
    starts = [first + (last - first) * number // args.prompts for number in range(args.prompts)]
    prompts = [all_ids[start : start + PROMPT_TOKENS] for start in starts]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    print(
        f"pydoc_data.topics (sha256 {digest}…): {len(token_ids)} tokens, {len(prompts)} prompts from the rest of it"
    )
    print(f"{'':<18}{'perplexity':>11}{'likeliest':>11}{'answers':>10}{'whole':>8}{'first':>8}")
    wanted, table = None, {}
    for dtype, weights in FORMATS:
        found = measure(directory, dtype, weights, token_ids, prompts)
        wanted = wanted or found
        quality = compare(found, wanted)
        name = dtype if weights == "auto" else f"{dtype}, {weights}"
        table[name] = asdict(quality)
        place = "-" if quality.first_difference is None else f"{quality.first_difference:g}"
        print(
            f"{name:<18}{quality.perplexity:>11.3f}{quality.likeliest_equal:>11.1%}{quality.answer_tokens_equal:>10.1%}"
            f"{quality.answers_equal:>8.0%}{place:>8}",
            flush=True,
        )
    print(
        "equal to the first: likeliest tokens, tokens of answers, whole answers; first: median place where one differs"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"text_sha256": digest, "formats": table}, indent=2), encoding="utf-8"
        )


def _load(
    directory: Path, dtype: str, weights: str, num_tokens: int, prompts: Sequence[Sequence[int]]
) -> ModelRunner:
    longest = max(len(prompt) for prompt in prompts) + ANSWER_TOKENS
    most_tokens = max(num_tokens, longest)
    num_blocks = max(-(-num_tokens // _BLOCK_SIZE), -(-longest // _BLOCK_SIZE) * len(prompts))
    config = EngineConfig(
        str(directory), dtype, "cpu", block_size=_BLOCK_SIZE, num_blocks=num_blocks, max_model_len=most_tokens,
        threads=torch.get_num_threads(), weights=weights,
    )  # fmt: skip
    return ModelRunner.load(config, lambda num_bytes: memoryview(bytearray(num_bytes)))


def _table(runner: ModelRunner, number: int, num_tokens: int) -> range:
    """The blocks of sequence `number`, of `num_tokens` at most like the others."""
    num_blocks = runner.layout.num_blocks(num_tokens)
    return range(number * num_blocks, (number + 1) * num_blocks)


def _answers(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Greedy answers to all prompts, in one batch."""
    keys = [RequestKey(f"prompt-{number}", 0) for number in range(len(prompts))]
    longest = max(len(prompt) for prompt in prompts) + ANSWER_TOKENS
    tables = [_table(runner, number, longest) for number in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    now, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(ANSWER_TOKENS):
        slices = zip(keys, now, starts, tables, strict=True)
        output = runner.run(StepBatch(tuple(SequenceSlice(*piece, _GREEDY) for piece in slices)))
        for number, key in enumerate(keys):
            starts[number] += len(now[number])
            now[number] = [output.token_ids[key]]
            answers[number] += now[number]
    return tuple(map(tuple, answers))


def _share_equal(found: Sequence[int], wanted: Sequence[int]) -> float:
    return statistics.fmean(a == b for a, b in zip(found, wanted, strict=True))


if __name__ == "__main__":
    main()
