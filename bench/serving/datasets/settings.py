"""What to make requests of: which lengths, which prompts, and what happens to those that the model cannot hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.config import require


class DatasetName(StrEnum):
    """Where lengths, times and prompts come from."""

    RANDOM = "random"
    """Fixed or uniform lengths."""
    LOGNORMAL = "lognormal"
    PREFIX_REPETITION = "prefix_repetition"
    """A few prefixes that many prompts share."""
    SHAREGPT = "sharegpt"
    """A JSON file of conversations: the first message is the prompt, the answer's length is the output's."""
    CUSTOM = "custom"
    """JSON lines with prompts."""
    JSONL_TRACE = "jsonl-trace"
    """JSON lines with timestamp (ms), input_length, output_length and hash_ids."""
    CSV_TRACE = "csv-trace"
    """A CSV file with a timestamp and token counts."""
    RECORDS = "records"
    """What a run of ours recorded."""
    AZURE_CODE = "azure-code"
    """Lengths and times as in the Azure LLM inference trace 2023, code completion: fitted, no file needed."""
    AZURE_CONVERSATION = "azure-conversation"
    MOONCAKE_CONVERSATION = "mooncake-conversation"


MOONCAKE_BLOCK = 512
"""Tokens that a hash id stands for in Mooncake's traces, and in those that do not say."""
FILE_DATASETS = frozenset(
    {
        DatasetName.SHAREGPT,
        DatasetName.CUSTOM,
        DatasetName.JSONL_TRACE,
        DatasetName.CSV_TRACE,
        DatasetName.RECORDS,
    }
)


class PromptAs(StrEnum):
    """How a made prompt is sent. The tokens are the same."""

    TEXT = "text"
    IDS = "ids"


class TooLong(StrEnum):
    """What becomes of a request whose prompt and output together are beyond the context."""

    REFUSE = "refuse"
    """None is made: a ConfigError says how many are too long."""
    CLIP = "clip"
    """The prompt loses its end; an output of more than half of the context is cut to that first."""
    SCALE = "scale"
    """All lengths of the workload are multiplied by one factor, so that the longest fits."""
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths uniform in [n·(1 − range_ratio), n·(1 + range_ratio)], in tokens; `prefix_len` tokens that all prompts
    share come before."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        require("--random-input-len", self.input_len, self.input_len >= 1, "at least 1 token")
        require("--random-output-len", self.output_len, self.output_len >= 1, "at least 1 token")
        require("--random-range-ratio", self.range_ratio, 0 <= self.range_ratio < 1, "from 0 to below 1")
        require("--random-prefix-len", self.prefix_len, self.prefix_len >= 0, "0 tokens or more")


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Lengths of which the logarithm is normal: `median` tokens, and `sigma` as its standard deviation (0: all equal).
    None is below 1 or above `most` tokens: a value beyond is drawn again."""

    input_median: float = 1024.0
    input_sigma: float = 0.8
    input_most: int = 1_000_000
    output_median: float = 128.0
    output_sigma: float = 0.8
    output_most: int = 1_000_000

    def __post_init__(self) -> None:
        for side in ("input", "output"):
            median, sigma = getattr(self, f"{side}_median"), getattr(self, f"{side}_sigma")
            most = getattr(self, f"{side}_most")
            flag = f"--lognormal-{side}"
            require(f"{flag}-median", median, math.isfinite(median) and median >= 1, "at least 1 token")
            require(f"{flag}-sigma", sigma, 0 <= sigma <= 4, "from 0 to 4")
            require(f"{flag}-most", most, most >= median, f"at least the median, {median:g}")


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """`num_prefixes` prefixes, each shared by as many prompts as the others, and an own suffix for each prompt.

    With `reuse_share` the sum of both lengths stays and the prefix becomes as long as it takes: the share of all prompt
    tokens that a prefix cache without bounds would hold already when their prompt comes.
    """

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    reuse_share: float | None = None

    def __post_init__(self) -> None:
        flag = "--prefix-repetition"
        require(f"{flag}-prefix-len", self.prefix_len, self.prefix_len >= 0, "0 tokens or more")
        require(f"{flag}-suffix-len", self.suffix_len, self.suffix_len >= 1, "at least 1 token")
        require(f"{flag}-num-prefixes", self.num_prefixes, self.num_prefixes >= 1, "at least 1")
        require(f"{flag}-output-len", self.output_len, self.output_len >= 1, "at least 1 token")
        share = self.reuse_share
        require(f"{flag}-reuse-share", share, share is None or 0 <= share < 1, "from 0 to below 1")


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How times and lengths of a trace are taken.

    A hash id stands for `block_size` tokens (None: what the file says, or `MOONCAKE_BLOCK`). Only requests that came
    from `start_s` on, for `window_s` seconds (None: to the end), are taken; at `speed` 2 they come twice as close
    together.
    """

    block_size: int | None = None
    speed: float = 1.0
    start_s: float = 0.0
    window_s: float | None = None

    def __post_init__(self) -> None:
        size = self.block_size
        require("--trace-block-size", size, size is None or size >= 1, "at least 1 token")
        require("--trace-speed", self.speed, math.isfinite(self.speed) and self.speed > 0, "above 0")
        require(
            "--trace-start", self.start_s, math.isfinite(self.start_s) and self.start_s >= 0, "0 s or later"
        )
        window = self.window_s
        require("--trace-window", window, window is None or window > 0, "above 0 s")


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """One workload before it is made.

    `path` is the file of those that read one. `max_model_len` is the context that prompt and output share (None: not
    checked). `length_scale` multiplies all lengths of made prompts and their outputs before that is checked.
    `output_len` replaces the outputs' lengths of ShareGPT and custom data. `shuffle` takes ShareGPT and custom entries
    in a random order, else in the file's.
    """

    name: DatasetName = DatasetName.RANDOM
    path: str | None = None
    prompt_as: PromptAs = PromptAs.TEXT
    max_model_len: int | None = None
    too_long: TooLong = TooLong.REFUSE
    length_scale: float = 1.0
    output_len: int | None = None
    shuffle: bool = True
    random: RandomLengths = field(default_factory=RandomLengths)
    lognormal: LognormalLengths = field(default_factory=LognormalLengths)
    prefix_repetition: PrefixRepetition = field(default_factory=PrefixRepetition)
    trace: TraceSettings = field(default_factory=TraceSettings)

    def __post_init__(self) -> None:
        takes_file = self.name in FILE_DATASETS
        allowed = (
            f"a file with --dataset-name {self.name}" if takes_file else f"none: {self.name} reads no file"
        )
        require("--dataset-path", self.path, bool(self.path) == takes_file, allowed)
        length = self.max_model_len
        require("--max-model-len", length, length is None or length >= 2, "at least 2 tokens")
        scale = self.length_scale
        require("--length-scale", scale, math.isfinite(scale) and scale > 0, "above 0")
        require(
            "--output-len",
            self.output_len,
            self.output_len is None or self.output_len >= 1,
            "at least 1 token",
        )
