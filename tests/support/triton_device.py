"""Where tests run Triton kernels: on a CUDA device, or without one in Triton's interpreter, on the CPU.

Triton decides at its import, so this comes before any module with kernels.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from triton import knobs  # noqa: E402  # after the setting that it reads

assert knobs.runtime.interpret == (DEVICE.type == "cpu"), "something imported Triton too early"
