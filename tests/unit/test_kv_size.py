"""The worked numbers of `twinpool kv-size`, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.cli import main
from twinpool.commands.kv_size import binary, parse_bytes

EIGHT_B = ("kv-size", "--layers", "32", "--kv-heads", "8", "--head-dim", "128")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_32_layers_8_heads_128(capsys: pytest.CaptureFixture[str]) -> None:
    """128 KiB per token, 512 MiB for 4,096 tokens; twenty such fill 10 GiB."""
    assert printed(capsys, *EIGHT_B, "--memory", "10GiB") == [
        "given shape: 32 layers × 8 KV heads × 128, bfloat16",
        "per token 128 KiB",
        "per block of 16 tokens 2 MiB",
        "per sequence of 4,096 tokens 512 MiB (256 blocks)",
        "in 10 GiB 5,120 blocks = 81,920 tokens = 20 such sequences",
    ]


def test_2300_tokens_take_144_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert "per sequence of 2,300 tokens 288 MiB (144 blocks)" in printed(
        capsys, *EIGHT_B, "--context", "2300"
    )


def test_float32_takes_twice_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert "per token 256 KiB" in printed(capsys, *EIGHT_B, "--dtype", "float32")


def test_kv_in_8_bits_takes_half_and_integers_their_scales(capsys: pytest.CaptureFixture[str]) -> None:
    """32 layers × 2 × 8 heads have 512 vectors of 128 bytes per token; a scale has 4 more."""
    assert "per token 64 KiB" in printed(capsys, *EIGHT_B, "--kv-cache-dtype", "fp8")
    assert "per token 66 KiB" in printed(capsys, *EIGHT_B, "--kv-cache-dtype", "int8", "--dtype", "float32")
    assert main((*EIGHT_B, "--kv-cache-dtype", "int4")) == 2
    assert "--kv-cache-dtype is 'int4'; allowed: auto, fp8, int8" in capsys.readouterr().err


def test_a_model_directory_needs_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Key/value heads count, never query heads; the context is the model's."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "head_dim": 128,
              "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936,
              "intermediate_size": 3072, "max_position_embeddings": 40_960, "dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = printed(capsys, "kv-size", str(tmp_path), "--block-size", "32", "--memory", "80GiB")
    assert lines[1:] == [
        "per token 112 KiB",
        "per block of 32 tokens 3.5 MiB",
        "per sequence of 40,960 tokens 4.4 GiB (1,280 blocks)",
        "in 80 GiB 23,405 blocks = 748,960 tokens = 18 such sequences",
    ]


def test_without_memory_it_is_what_serve_takes_of_what_is_free_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, *EIGHT_B)[-1].startswith("in 25% of the free memory here (")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--layers", "32"), "--kv-heads is missing; give all of --layers, --kv-heads and --head-dim"),
        ((*EIGHT_B[1:], "--block-size", "0"), "--block-size is 0; allowed: 1 or more"),
        ((*EIGHT_B[1:], "--dtype", "int3"), "--dtype is 'int3'; allowed: auto, float32, bfloat16, float16"),
        (
            (*EIGHT_B[1:], "--query-heads", "12"),
            "--query-heads is 12; allowed: a multiple of the 8 --kv-heads",
        ),
        (("--query-heads", "32"), "--query-heads is 32; allowed: only with --layers, --kv-heads, --head-dim"),
        (
            (*EIGHT_B[1:], "--expect", "1MiB"),
            "--expect is 1,048,576 bytes per token, but 2 × 32 layers × 8 kv_heads",
        ),
        ((*EIGHT_B[1:], "m"), "MODEL is 'm' and --layers is 32; give one or the other"),
    ],
)
def test_wrong_settings_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main(["kv-size", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_sizes_are_read_and_written_in_their_units() -> None:
    assert [parse_bytes(text) for text in ("80GiB", "16GB", "1.5 g", "512MiB", "1000", "2Ki")] == [
        80 << 30, 16 * 10**9, 1_500_000_000, 512 << 20, 1000, 2048]  # fmt: skip
    assert [binary(size) for size in (1, 1536, 288 << 20, (1 << 40) + 1)] == [
        "1 B",
        "1.5 KiB",
        "288 MiB",
        "1.0 TiB",
    ]


@pytest.mark.parametrize("text", ["", "GiB", "80 bits", "-1GiB", "i"])
def test_other_sizes_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["kv-size", f"--memory={text}"])
    assert "write it like 80GiB" in capsys.readouterr().err
