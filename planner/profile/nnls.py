"""Least squares with coefficients that are never negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TOLERANCE = 1e-10
"""Of the largest possible gradient: less is rounding."""


def nnls(a: Floats, b: Floats) -> Floats:
    """x ≥ 0, [columns], that minimizes |a x − b|; `a` is [rows, columns], `b` [rows].

    The active set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23. Columns are scaled
    to length 1 meanwhile, so units do not matter; one of zeros gets 0.
    """
    lengths = np.sqrt((a * a).sum(axis=0))
    scaled = a / np.where(lengths > 0, lengths, 1.0)
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=bool)
    limit = _TOLERANCE * max(float(np.abs(scaled.T @ b).max(initial=0.0)), 1e-300)
    for _ in range(3 * num_columns + 3):  # each round frees one; the method needs about as many as columns
        gradient = scaled.T @ (b - scaled @ x)
        gradient[is_free] = -np.inf
        chosen = int(np.argmax(gradient)) if num_columns else -1
        if chosen < 0 or gradient[chosen] <= limit:
            break
        is_free[chosen] = True
        x = _feasible(scaled, b, x, is_free)
    return np.asarray(x / np.where(lengths > 0, lengths, 1.0))


def _feasible(a: Floats, b: Floats, x: Floats, is_free: NDArray[np.bool_]) -> Floats:
    """From x as far towards the best values of the free ones as none becomes negative; those that would are not free
    any more (in `is_free`, in place). Repeated until all that are left are best."""
    while True:
        wanted = np.zeros_like(x)
        wanted[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        bad = is_free & (wanted <= 0)
        if not bad.any():
            return wanted
        steps = x[bad] / np.maximum(x[bad] - wanted[bad], 1e-300)
        x = x + float(steps.min()) * (wanted - x)
        is_free &= x > 1e-15
        x = np.where(is_free, x, 0.0)
