"""Flags that say which requests a load consists of, shared by the commands that send one. Names are those of
`vllm bench serve` where that has the same."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.bench.serving.datasets.settings import (
    FILE_DATASETS,
    DatasetName,
    DatasetSettings,
    LognormalLengths,
    PrefixRepetition,
    PromptAs,
    RandomLengths,
    TooLong,
    TraceSettings,
)
from twinpool.commands.flags import Flag, add_flags, config_from, one_of
from twinpool.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import tokenizers

_DATASET = (
    Flag("--dataset-name", DatasetSettings, "name", "NAME", ", ".join(DatasetName), one_of(*DatasetName)),
    Flag("--dataset-path", DatasetSettings, "path", "FILE", f"the file of {', '.join(sorted(FILE_DATASETS))}"),
    Flag("--prompt-as", DatasetSettings, "prompt_as", "FORM",
         "text or ids: how made prompts are sent; their tokens are the same", one_of(*PromptAs)),
    Flag("--too-long", DatasetSettings, "too_long", "WHAT",
         "refuse, clip, scale or drop: what becomes of requests beyond the context (--max-model-len)",
         one_of(*TooLong)),
    Flag("--length-scale", DatasetSettings, "length_scale", "FACTOR",
         "multiply all lengths of made prompts and their outputs", float),
    Flag("--max-model-len", DatasetSettings, "max_model_len", "TOKENS",
         "longest prompt plus output that the server takes (default: what the model does, where it is known)", int),
)  # fmt: skip
_RANDOM = (
    Flag("--random-input-len", RandomLengths, "input_len", "TOKENS", "prompt", int),
    Flag("--random-output-len", RandomLengths, "output_len", "TOKENS", "output", int),
    Flag("--random-range-ratio", RandomLengths, "range_ratio", "R",
         "lengths are uniform from n·(1 - R) to n·(1 + R)", float),
    Flag("--random-prefix-len", RandomLengths, "prefix_len", "TOKENS",
         "before the prompt, the same for all", int),
)  # fmt: skip
_LOGNORMAL = (
    Flag("--lognormal-input-median", LognormalLengths, "input_median", "TOKENS", "prompt", float),
    Flag("--lognormal-input-sigma", LognormalLengths, "input_sigma", "S",
         "standard deviation of the logarithm of the prompt's length", float),
    Flag("--lognormal-input-most", LognormalLengths, "input_most", "TOKENS", "longest prompt", int),
    Flag("--lognormal-output-median", LognormalLengths, "output_median", "TOKENS", "output", float),
    Flag("--lognormal-output-sigma", LognormalLengths, "output_sigma", "S", "likewise", float),
    Flag("--lognormal-output-most", LognormalLengths, "output_most", "TOKENS", "longest output", int),
)  # fmt: skip
_PREFIX = (
    Flag("--prefix-repetition-prefix-len", PrefixRepetition, "prefix_len", "TOKENS", "shared beginning", int),
    Flag("--prefix-repetition-suffix-len", PrefixRepetition, "suffix_len", "TOKENS", "own end", int),
    Flag("--prefix-repetition-num-prefixes", PrefixRepetition, "num_prefixes", "N", "different beginnings", int),
    Flag("--prefix-repetition-output-len", PrefixRepetition, "output_len", "TOKENS", "output", int),
    Flag("--prefix-repetition-reuse-share", PrefixRepetition, "reuse_share", "SHARE",
         "choose the prefix's part of both lengths so that this share of all prompt tokens is known to a prefix cache",
         float),
)  # fmt: skip
_TRACE = (
    Flag("--trace-block-size", TraceSettings, "block_size", "TOKENS",
         "that a hash id stands for (default: as the file says, or 512)", int),
    Flag("--trace-speed", TraceSettings, "speed", "FACTOR", "2: requests come twice as close together", float),
    Flag("--trace-start", TraceSettings, "start_s", "SECONDS", "leave out what came before", float),
    Flag("--trace-window", TraceSettings, "window_s", "SECONDS", "leave out what came later than so long after",
         float),
)  # fmt: skip
_GROUPS = (
    ("random dataset", _RANDOM),
    ("lognormal dataset", _LOGNORMAL),
    ("prefix_repetition dataset", _PREFIX),
    ("traces, records and fitted datasets", _TRACE),
)


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them, for `dataset_settings` to read. `--num-prompts`, `--seed` and `--tokenizer` are the command's own."""
    group = parser.add_argument_group("dataset")
    add_flags(group, _DATASET)
    group.add_argument(
        "--output-len", "--sharegpt-output-len", "--custom-output-len",
        dest="DatasetSettings.output_len", type=int, metavar="TOKENS",
        help="output of sharegpt and custom requests (default: the answer's length; what the line says, or 256)",
    )  # fmt: skip
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take sharegpt and custom requests in the file's order"
    )
    for title, flags in _GROUPS:
        add_flags(parser.add_argument_group(title), flags)


def dataset_settings(args: argparse.Namespace, *, max_model_len: int | None = None) -> DatasetSettings:
    """The dataset flags as a checked value; `max_model_len` holds where no `--max-model-len` says otherwise.

    Raises ConfigError.
    """
    settings: DatasetSettings = config_from(
        args,
        DatasetSettings,
        shuffle=not args.disable_shuffle,
        random=config_from(args, RandomLengths),
        lognormal=config_from(args, LognormalLengths),
        prefix_repetition=config_from(args, PrefixRepetition),
        trace=config_from(args, TraceSettings),
    )
    return settings if settings.max_model_len is not None else replace(settings, max_model_len=max_model_len)


def load_tokenizer(name: str | None) -> tokenizers.Tokenizer:
    """The tokenizer that prompts are made and counted with: of a tokenizer.json, of a model's directory or .gguf file,
    of a model on the Hugging Face hub (only its tokenizer is fetched), or of the built-in model (None).

    Raises:
        ConfigError: the file is no tokenizer, or the hub has none.
        ModelError: the directory or the .gguf file is no model.
    """
    import tokenizers

    from twinpool.engine.default_model import DEFAULT_MODEL

    path = Path(name or DEFAULT_MODEL).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.suffix == ".json" and file.is_file():
            found = tokenizers.Tokenizer.from_file(str(file))
        elif name is None or name == DEFAULT_MODEL or path.exists():
            found = _of_model(name)
        else:
            found = tokenizers.Tokenizer.from_pretrained(name)
    except ModelError:
        raise
    except Exception as exc:  # tokenizers raises nothing more specific
        raise ConfigError(
            f"--tokenizer is {name!r}, and no tokenizer could be read from there: {exc}. Name a tokenizer.json, a "
            "model's directory or one of the Hugging Face hub"
        ) from exc
    found.no_truncation()
    found.no_padding()
    return found


def _of_model(name: str | None) -> tokenizers.Tokenizer:
    from twinpool.engine.model_files import resolve
    from twinpool.engine.tokenizer import Tokenizer

    return Tokenizer.from_dir(resolve(name, needs_weights=False).path).backend
