"""lm_eval over `/v1/completions` scores the model as it does with `transformers` on the same weights.

Its `local-completions` sends batches of token-id lists with `echo`, `logprobs` and next to no output, and takes a token
for the greedy one if its log probability is the greatest of its `top_logprobs`: a likelihood or that comparison off by
a little shows in the scores. The tasks are in lm_eval_tasks/: facts to choose between, prose to be surprised by, and
rows to go on with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.clients import MODEL, ROOT, command, needs, run
from support.default_model import default_model_dir
from support.server import Server

pytestmark = [needs("lm-eval"), pytest.mark.timeout(420)]
TASKS = ROOT / "tests" / "clients" / "lm_eval_tasks"
LIMIT_S = 180.0
THIRD_DIGIT = 1e-3
MAX_LENGTH = 1024

Scores = Mapping[str, float]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks, with the path of their data."""
    folder = tmp_path_factory.mktemp("tasks")
    for task in TASKS.glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("FOLDER", str(TASKS)))
    return folder


def scores(tasks: Path, folder: Path, model: str, model_args: Mapping[str, object], *more: str) -> Scores:
    """What lm_eval finds, by task and metric."""
    arguments = ",".join(f"{name}={value}" for name, value in model_args.items())
    run(
        [
            command("lm-eval", "python"), "-m", "lm_eval", "--model", model, "--model_args", arguments,
            "--tasks", "twinpool_facts,twinpool_prose,twinpool_counting", "--include_path", str(tasks),
            "--num_fewshot", "0", "--output_path", str(folder / "out"), *more,
        ],
        folder,
        LIMIT_S,
        {"OPENAI_API_KEY": "none"},
    )  # fmt: skip
    (file,) = (folder / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return {
        f"{task} {name}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_the_scores_are_those_of_transformers_on_the_same_weights(
    server: Server, tasks: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three tasks, six metrics, equal to the third digit."""
    weights = default_model_dir()
    over_http = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": weights,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": MAX_LENGTH,
    }
    given = scores(
        tasks, tmp_path_factory.mktemp("http"), "local-completions", over_http, "--batch_size", "6"
    )
    local = {"pretrained": weights, "dtype": "float32", "max_length": MAX_LENGTH}
    wanted = scores(
        tasks, tmp_path_factory.mktemp("local"), "hf", local, "--device", "cpu", "--batch_size", "8"
    )
    assert given.keys() == wanted.keys()
    assert {name.split()[0] for name in wanted} == {"twinpool_facts", "twinpool_prose", "twinpool_counting"}
    far = {
        name: (given[name], wanted[name])
        for name in wanted
        if abs(given[name] - wanted[name]) > THIRD_DIGIT * abs(wanted[name])
    }
    assert not far
    assert 0.3 < wanted["twinpool_facts acc,none"] < 1, "too easy or too hard to tell a wrong likelihood"
