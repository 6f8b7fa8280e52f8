"""Which GPU a thread launches on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the one that this thread launches on, if it is a GPU: Triton goes by that and not, as torch's own
    operators do, by where the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
