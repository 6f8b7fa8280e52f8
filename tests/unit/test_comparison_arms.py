"""What an arm is: equal hardware for all of ours, and clear words for what is none."""

from __future__ import annotations

import pytest

from twinpool.bench.comparison.arms import parse_arm, parse_arms
from twinpool.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name", "flags", "num_workers"),
    [
        ("1p1d", "1P1D", "--prefill 1 --decode 1", 2),
        ("2P3D", "2P3D", "--prefill 2 --decode 3", 5),
        ("hybrid", "1P1D-hybrid", "--prefill 1 --decode 1 --hybrid", 2),
        ("2p1d-hybrid", "2P1D-hybrid", "--prefill 2 --decode 1 --hybrid", 3),
        ("colocated-whole", "colocated-whole", "--colocated 1 --token-budget 8192", 1),
        ("2xcolocated-chunked-64", "2xcolocated-chunked-64", "--colocated 2 --token-budget 64", 2),
        ("mine=--colocated 2 --strict", "mine", "--colocated 2 --strict", 2),
        ("mine=--prefill 3", "mine", "--prefill 3", 4),
    ],
)
def test_an_arm_is_named_by_its_layout(text: str, name: str, flags: str, num_workers: int) -> None:
    arm = parse_arm(text, max_model_len=8192)
    assert (arm.name, " ".join(arm.serve), arm.num_workers, arm.is_tuned) == (name, flags, num_workers, False)


def test_a_chunked_arm_without_a_budget_is_tuned_first() -> None:
    arm = parse_arm("colocated-chunked", 8192)
    assert arm.is_tuned
    tuned = arm.with_token_budget(96)
    assert (tuned.name, tuned.is_tuned) == ("colocated-chunked-96", False)
    assert tuned.serve[-2:] == ("--token-budget", "96")


def test_a_running_server_is_an_arm() -> None:
    arm = parse_arm("vllm=http://127.0.0.1:9000/", 8192)
    assert (arm.name, arm.url, arm.serve) == ("vllm", "http://127.0.0.1:9000", ())


def test_all_layouts_have_kv_for_the_same_number_of_tokens() -> None:
    for text in ("colocated-whole", "1p1d", "2p3d", "2xcolocated-chunked-64"):
        arm = parse_arm(text, 8192)
        arguments = arm.arguments(["--dtype", "bfloat16"], kv_tokens=96_000, block_size=16)
        num_blocks = int(arguments[arguments.index("--num-blocks") + 1])
        assert num_blocks * arm.num_workers * 16 == 96_000


@pytest.mark.parametrize(
    "text",
    [
        "0p1d",
        "1p",
        "colocated",
        "colocated-whole-64",
        "0xcolocated-whole",
        "=http://h:1",
        "x=http://",
        "a/b=http://h:1",
    ],
)
def test_what_names_no_layout_is_refused_with_those_that_are_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="--arms"):
        parse_arm(text, 8192)


@pytest.mark.parametrize("text", ["1p1d", "1p1d,1P1D", ""])
def test_a_comparison_needs_two_different_arms(text: str) -> None:
    with pytest.raises(ConfigError, match="--arms"):
        parse_arms(text, 8192)
