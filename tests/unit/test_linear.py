"""Products with packed weights: right on ragged shapes, the same to the bit in every batch, whatever the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from twinpool.kernels import linear
from twinpool.kernels.jit import flat
from twinpool.kernels.linear import (
    Linear,
    interleaved,
    linear_reference,
    multiply,
    pack,
    pack_bias,
    pack_integers,
    padded,
    panel_scratch_size,
    quantized,
)

DTYPES = [torch.float32, torch.bfloat16]
# Sums of at most 200 products of about 1, in another order than torch's; bfloat16 then rounds by up to 2⁻⁸ of about 40.
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2}}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (33, 71), (64, 64), (200, 129)])
def test_linear_is_its_formula_whatever_the_shape(
    columns: int, width: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight = random(columns, width, dtype=dtype)
    bias = random(columns, dtype=dtype) if has_bias else None
    packed = Linear(weight, bias)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 40, 70):
        x = random(rows, width, dtype=dtype)
        torch.testing.assert_close(packed(x), linear_reference(x, weight, bias), **TOLERANCE[dtype])


def check_rows(dtype: torch.dtype) -> None:
    """A row's product is the same to the bit in batches of every size up to 70, and of 300."""
    x, weight = random(300, 576, dtype=dtype), random(70, 576, dtype=dtype)
    packed = Linear(weight)
    alone = torch.cat([packed(row) for row in x.split(1)])
    # 576 products of about 1: sums of about 24, in another order than torch's; bfloat16 rounds by up to 2⁻⁸ of 100.
    torch.testing.assert_close(alone, linear_reference(x, weight), rtol=TOLERANCE[dtype]["rtol"], atol=2e-3)
    for rows in (*range(2, 71), 300):
        assert torch.equal(packed(x[:rows]), alone[:rows]), rows


def check_rows_of_integers(dtype: torch.dtype) -> None:
    """The same for weights of one byte."""
    x, weight = random(70, 576, dtype=dtype), random(70, 576, dtype=dtype)
    alone = torch.cat([times_integers(row, weight) for row in x.split(1)])
    for rows in range(2, 71):
        assert torch.equal(times_integers(x[:rows], weight), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", [check_rows, check_rows_of_integers])
def test_a_row_times_a_matrix_is_the_same_to_the_bit_in_every_batch(
    check: Callable[[torch.dtype], None], dtype: torch.dtype
) -> None:
    check(dtype)


@pytest.mark.parametrize("kind", [linear.ADD, linear.GATE])
def test_what_a_product_becomes_is_the_same_to_the_bit_in_every_batch_on_any_rank(kind: int) -> None:
    """Columns end within a panel; the width is one for matrix tiles, where the processor has them."""
    columns, width = 70, 96
    x, weight = random(70, width, dtype=torch.bfloat16), random(192, width, dtype=torch.bfloat16)
    packed, added = flat(pack(weight)), random(70, columns, dtype=torch.bfloat16)

    def product(first: int, end: int, size: int) -> torch.Tensor:
        out = added[first:end].clone()
        for rank in range(size):
            multiply(
                rank, size, flat(x[first:end]), width, end - first, packed, 0, packed, linear.NO_BIAS, columns, kind,
                np.empty(size * linear.SUMS, np.float32), flat(out), columns,
            )  # fmt: skip
        return out

    alone = torch.cat([product(row, row + 1, 1) for row in range(70)])
    for rows in range(2, 71):
        assert torch.equal(product(0, rows, 1), alone[:rows]), rows
    for size in (2, 3):
        assert torch.equal(product(0, 70, size), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_together_do_what_one_does(rows: int, size: int, dtype: torch.dtype) -> None:
    """Also adding to what is there, and putting results into wider rows."""
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((rows, 48), (150, 48), (150,)))
    room = random(rows, 160, dtype=dtype)
    wanted = room.clone()
    wanted[:, :150] = (room[:, :150].float() + F.linear(x.float(), weight.float(), bias.float())).to(dtype)
    packed = torch.cat((pack(weight), pack_bias(bias)))
    sums = np.empty(size * linear.SUMS, np.float32)
    for rank in range(size):
        multiply(
            rank, size, flat(x), 48, rows, flat(packed), 0, flat(packed), 3 * linear.PANEL * 48, 150, linear.ADD, sums,
            flat(room), 160,
        )  # fmt: skip
    torch.testing.assert_close(room, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_become_one_product_in_the_same_pass(has_bias: bool, dtype: torch.dtype) -> None:
    rows, inner, width = 9, 75, 32
    x, gate, up = (random(*shape, dtype=dtype) for shape in ((rows, width), (inner, width), (inner, width)))
    biases = [random(inner, dtype=dtype) for _ in range(2)]
    parts = [pack(interleaved(gate, up))] + ([pack_bias(interleaved(*biases))] if has_bias else [])
    out, packed = x.new_empty(rows, inner), flat(torch.cat(parts))
    multiply(
        0, 1, flat(x), width, rows, packed, 0, packed, len(parts[0]) if has_bias else linear.NO_BIAS, inner,
        linear.GATE, np.empty(linear.SUMS, np.float32), flat(out), inner,
    )  # fmt: skip
    gates, ups = (
        F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
        for weight, bias in zip((gate, up), biases, strict=True)
    )
    torch.testing.assert_close(out, (F.silu(gates) * ups).to(dtype), **TOLERANCE[dtype])


def times_integers(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias with `weight` rounded to int8."""
    columns, width = weight.shape
    out = x.new_empty(len(x), columns)
    x = F.pad(x, (0, padded(width, x.dtype) - width))
    sums = np.empty(linear.SUMS + panel_scratch_size(width, x.dtype), np.float32)
    biases = flat(x.new_zeros(1) if bias is None else pack_bias(bias))
    multiply(
        0, 1, flat(x), x.shape[1], len(x), pack_integers(weight).numpy(), 0, biases,
        linear.NO_BIAS if bias is None else 0, columns, linear.STORE, sums, flat(out), columns,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (33, 71), (200, 129)])
def test_a_product_with_integers_is_one_with_what_they_stand_for(
    columns: int, width: int, dtype: torch.dtype
) -> None:
    """One row is zero, one has a single large element: the scales are the rows' own."""
    weight, bias = random(columns, width, dtype=dtype), random(columns, dtype=dtype)
    weight[columns // 2] = 0
    weight[-1, 0] = 100
    scales, integers = quantized(weight)
    assert ((integers * scales[:, None] - weight.float()).abs() <= 0.5001 * scales[:, None]).all()
    for rows in (0, 1, 2, 5, 6, 7, 23, 24, 70):
        x = random(rows, width, dtype=dtype)
        for added in (None, bias):
            wanted = linear_reference(x.float(), integers * scales[:, None], added).to(dtype)
            torch.testing.assert_close(times_integers(x, weight, added), wanted, **TOLERANCE[dtype])


_ON_A_LESSER_PROCESSOR = """
import sys
import torch
from twinpool.kernels.linear import Linear, linear_reference, quantized
from unit.test_linear import times_integers
torch.manual_seed(0)
dtype = getattr(torch, sys.argv[1])
tolerance = {torch.float32: 1e-4, torch.bfloat16: 2**-7}[dtype]
weight, x = torch.randn(70, 99).to(dtype), torch.randn(13, 99).to(dtype)
packed = Linear(weight)
torch.testing.assert_close(packed(x), linear_reference(x, weight), rtol=tolerance, atol=1e-2)
assert torch.equal(packed(x)[5:6], packed(x[5:6]))
scales, integers = quantized(weight)
wanted = linear_reference(x.float(), integers * scales[:, None]).to(dtype)
torch.testing.assert_close(times_integers(x, weight), wanted, rtol=tolerance, atol=1e-2)
"""


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="names x86's instruction sets; run it on such a processor"
)
@pytest.mark.parametrize(
    ("features", "dtype"),
    [("+avx,+avx2,+fma,+f16c,+bmi2", "bfloat16"), ("+sse2", "float32")],
)
def test_a_processor_without_bfloat16_or_wide_vectors_gives_the_same(features: str, dtype: str) -> None:
    """Compiling is what takes long here: each set of instructions and each type is there once."""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_LESSER_PROCESSOR, dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
