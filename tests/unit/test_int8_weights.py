"""`--weights int8` in a runner: what it changes, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.tiny_models import load_runner, piece, step, tokens

from twinpool.bench.engine.made_models import MadeShape, make_model
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_runner import check_weights
from twinpool.errors import ConfigError


def test_int8_weights_have_a_fingerprint_of_their_own_and_change_logits_by_little(tmp_path: Path) -> None:
    directory = make_model(tmp_path, MadeShape())
    exact, rounded = load_runner(directory), load_runner(directory, weights="int8")
    assert rounded.fingerprint == f"{exact.fingerprint} with int8 weights"
    ids = tokens(30)
    wanted, found = (runner.logits(step(piece("a", ids, 0, range(4)))) for runner in (exact, rounded))
    assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()


def test_int8_weights_are_refused_where_they_cannot_run(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(make_model(tmp_path, MadeShape()))
    check_weights("auto", config, torch.device("cuda"))
    check_weights("int8", config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--weights is 'int8'; allowed: auto on cuda"):
        check_weights("int8", config, torch.device("cuda"))
    foreign = replace(config, family=None, architecture="GPT2LMHeadModel")
    with pytest.raises(ConfigError, match="auto for GPT2LMHeadModel, which runs through transformers"):
        check_weights("int8", foreign, torch.device("cpu"))
