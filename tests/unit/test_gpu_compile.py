"""Every Triton kernel compiles for the GPUs that Twinpool is made for, and fits them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import support.triton_device  # noqa: F401  # before Triton

from twinpool.kernels.gpu import compile as harness
from twinpool.kernels.gpu.variant import Variant

ROOT = Path(__file__).parents[2]
FITS = harness.Compiled("paged_attention._chunk", "bf16 head 64", 80, "8.7", 181, 0, 163 << 10)


@pytest.mark.timeout(300)  # 35 s of one core; this is for one that is shared
def test_every_kernel_compiles_for_sm_80_and_sm_90_without_a_gpu() -> None:
    """In a process of its own: in this one, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "twinpool.kernels.gpu.compile", "--processes", "2"],
        env={**environment, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    *lines, verdict = run.stdout.splitlines()[1:]
    assert verdict.endswith("2 architectures, compiled, no spills, all fit")
    rows = [line.split() for line in lines]
    compiled = {row[0].partition(".")[0] for row in rows}
    assert compiled == {name for name in harness.module_names() if harness.variants(name)}
    assert len({row[0] for row in rows if "sm_80" in row} ^ {row[0] for row in rows if "sm_90" in row}) == 0


def test_what_does_not_fit_is_named_with_its_figures_and_the_limit() -> None:
    assert list(FITS.faults()) == []
    [shared] = replace(FITS, shared=(163 << 10) + 16).faults()
    assert "paged_attention._chunk (bf16 head 64) for sm_80 needs 166928 bytes" in shared
    assert "the limit is 166912" in shared
    assert list(replace(FITS, shared=227 << 10, capability=90).faults()) == []
    [spilled] = replace(FITS, stack=8).faults()
    assert "keeps 8 bytes per thread in memory; the limit is 0" in spilled


def test_the_verdict_counts_what_was_compiled_and_what_cannot_be_accepted() -> None:
    found = [FITS, replace(FITS, capability=90)]
    assert (
        harness.verdict(found) == "kernels: 1, in 1 variants × 2 architectures, compiled, no spills, all fit"
    )
    assert harness.verdict([FITS, replace(FITS, stack=8)]).endswith("compiled, 1 of 2 cannot be accepted")


def test_a_variant_names_every_argument_once() -> None:
    kernel = SimpleNamespace(__name__="_copy", arg_names=["source", "target", "SIZE"])
    for types, constants, wrong in (
        ({"source": "*bf16"}, {"SIZE": 8}, "target"),
        ({"source": "*bf16", "target": "*bf16", "SIZE": "i32"}, {"SIZE": 8}, "SIZE"),
        ({"source": "*bf16", "target": "*bf16", "other": "i32"}, {"SIZE": 8}, "other"),
    ):
        with pytest.raises(TypeError, match=f"does not name .*{wrong}.* once each"):
            harness.compile_variant("block_copy", Variant(kernel, "bf16", types, constants), 80)


def test_a_kernel_that_is_launched_and_not_listed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinpool.kernels.gpu import activation

    monkeypatch.setattr(activation, "VARIANTS", ())
    with pytest.raises(ValueError, match=r"launches \['_silu_mul'\] and does not list it"):
        harness.variants("activation")
