"""What a wrong command line is told: one line, and where help is."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.cli import main
from twinpool.commands.foreign_flags import HINTS


@pytest.mark.parametrize(
    ("arguments", "program", "told"),
    [
        (["serve", "--prefill", "x"], "twinpool serve", "argument --prefill: invalid int value: 'x'"),
        (
            ["serve", "--colocate=1", "--bogus"],
            "twinpool serve",
            "unrecognized arguments: --colocate --bogus",
        ),
        (["worker"], "twinpool worker", "the following arguments are required: --role"),
        (["api-key", "new", "--bogus"], "twinpool api-key", ""),
        (["nonsense"], "twinpool", "invalid choice: 'nonsense'"),
        (["bench", "--bogus"], "twinpool bench serve", "unrecognized arguments: --bogus"),
        (["bench", "engine", "--bogus"], "twinpool bench engine", "unrecognized arguments: --bogus"),
        (
            ["serve", "--api-key", "sk-abc"],
            "twinpool serve",
            "arguments: --api-key; --api-key: use --api-keys FILE",
        ),
        (
            ["serve", "M", "--api-key=sk-abc"],
            "twinpool serve",
            "arguments: --api-key; --api-key: use --api-keys FILE",
        ),
        (
            ["serve", "--api-key", "-sk-abc"],
            "twinpool serve",
            "arguments: --api-key; --api-key: use --api-keys FILE",
        ),
        (["serve", "--gpu_memory_utilization", "0.9"], "twinpool serve", "use --kv-memory-fraction"),
        (["serve", "M", "-tp", "2"], "twinpool serve", "-tp: not there yet"),
        (["serve", "--max_num_seqs", "2"], "twinpool serve", "--max_num_seqs: is --max-num-seqs meant?"),
        (
            ["serve", "M", "--served-model-name", "a", "b"],
            "twinpool serve",
            "--served-model-name takes one name",
        ),
        (["bench", "--api-ke", "sk-abc"], "twinpool bench serve", "--api-ke"),
        ([], "twinpool", "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], program: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{program}: " if told else program)
    assert error.endswith(f"; see `{program} --help`\n" if told else " --help`\n")
    assert told in error
    assert error.count("\n") == 1
    assert "sk-abc" not in error


def test_what_is_said_of_other_servers_flags_names_flags_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = capsys.readouterr().out
    known = set(re.findall(r"--[a-z][a-z-]+", told))
    assert set(re.findall(r"--[a-z][a-z-]+", " ".join(HINTS.values()))) <= known
    assert not known & HINTS.keys()
    assert told.rstrip().splitlines()[-1].endswith("docs/from-vllm.md")


def test_a_context_that_the_model_does_not_have_is_refused_before_workers_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = {**sizes, "vocab_size": 8, "max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert main(["serve", str(tmp_path), "--max-model-len", "65"]) == 2
    told = capsys.readouterr().err
    assert "--max-model-len is 65" in told
    assert "2 to 64, the model's context" in told


KV_SIZE = (sys.executable, "-m", "twinpool", "kv-size", "--layers", "2", "--kv-heads", "1", "--head-dim", "8")


def test_output_that_nobody_reads_ends_a_command_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        command = [*KV_SIZE, "--context", "16"]
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, a disk that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_fails_in_one_line(unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*KV_SIZE, "--context", "16"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "twinpool: standard output cannot be written: No space left on device; send it elsewhere, or make room there\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, a disk that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["kv-size", "--help"]])
@pytest.mark.parametrize("buffering", [0, -1])
def test_help_that_cannot_be_written_fails_as_other_output_does(
    buffering: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        Path("/dev/full").open("wb", buffering) as full,
        io.TextIOWrapper(full, write_through=not buffering) as output,
    ):
        monkeypatch.setattr(sys, "stdout", output)
        assert main(arguments) == 1
    assert "standard output cannot be written: No space left on device" in capsys.readouterr().err


def test_another_fault_of_the_system_is_not_taken_for_one_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinpool.commands.kv_size.run", fail)
    with pytest.raises(OSError, match="No space left on device"):
        main([*KV_SIZE[3:], "--context", "16"])
    assert "standard output" not in capsys.readouterr().err
