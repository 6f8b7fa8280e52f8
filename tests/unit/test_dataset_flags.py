"""Flags of datasets: the names of `vllm bench serve`, checked, and the tokenizer that they are made with."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from support.made_tokenizers import byte_level

from twinpool.bench.serving.datasets.settings import (
    DatasetName,
    DatasetSettings,
    PromptAs,
    RandomLengths,
    TooLong,
)
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings, load_tokenizer
from twinpool.errors import ConfigError


def _settings(*argv: str) -> DatasetSettings:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser)
    return dataset_settings(parser.parse_args(argv))


def test_without_flags_the_dataset_is_the_default_one() -> None:
    assert _settings() == DatasetSettings()


def test_flags_of_vllm_mean_the_same() -> None:
    settings = _settings(
        *("--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "20"),
        *("--random-range-ratio", "0.2", "--random-prefix-len", "50", "--disable-shuffle"),
    )
    assert settings.random == RandomLengths(300, 20, 0.2, 50)
    assert not settings.shuffle
    for flag in ("--sharegpt-output-len", "--custom-output-len", "--output-len"):
        assert _settings("--dataset-name", "sharegpt", "--dataset-path", "x.json", flag, "9").output_len == 9
    repeated = _settings("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3")
    assert (repeated.name, repeated.prefix_repetition.num_prefixes) == (DatasetName.PREFIX_REPETITION, 3)


def test_our_own_flags_reach_their_settings() -> None:
    settings = _settings(
        *(
            "--dataset-name",
            "jsonl-trace",
            "--dataset-path",
            "t.jsonl",
            "--prompt-as",
            "ids",
            "--too-long",
            "clip",
        ),
        *("--max-model-len", "2048", "--length-scale", "0.5", "--trace-speed", "3", "--trace-window", "60"),
    )
    assert (settings.prompt_as, settings.too_long, settings.max_model_len) == (
        PromptAs.IDS,
        TooLong.CLIP,
        2048,
    )
    assert (settings.length_scale, settings.trace.speed, settings.trace.window_s) == (0.5, 3.0, 60.0)


@pytest.mark.parametrize(("argv", "expected"), [((), 4096), (("--max-model-len", "77"), 77)])
def test_the_context_is_the_models_unless_the_flag_says_another(argv: tuple[str, ...], expected: int) -> None:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser)
    assert dataset_settings(parser.parse_args(argv), max_model_len=4096).max_model_len == expected


def test_a_dataset_that_is_not_known_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        _settings("--dataset-name", "sonnet")
    assert "prefix_repetition, sharegpt" in capsys.readouterr().err


def test_a_tokenizer_is_read_from_a_file_or_a_directory(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(name)).encode("bana").ids == byte_level().encode("bana").ids


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json.* no tokenizer could be read from there"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
