"""Choosing a token: filters, and noise that is a pure function of (seed, position, token).

Filters in this order: temperature, top-k, top-p (nucleus: Holtzman et al. 2019, arXiv:1904.09751), min-p (Nguyen et
al. 2024, arXiv:2407.01082). Then the exponential race, which is the Gumbel-max trick (Gumbel 1954) with one
logarithm: token i with probability p_i and an independent exponential variable E_i wins if p_i / E_i is the largest,
and does so with probability p_i. E_i comes from the counter-based generator Philox4x32-10 (Salmon et al. 2011, doi
10.1145/2063384.2063405): key = the seed's low and high word, counter = (i // 4, low and high word of the position, 0),
word i % 4 of the output.
"""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF
LEAST_NOISE = 2.0**-25
"""-log(1 - 2⁻²⁵), of the largest uniform number, which float32 rounds to 1."""


def philox_reference(key: tuple[int, int], counter: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: `counter` int64 [n, 4] of 32-bit words → int64 [n, 4] of 32-bit words."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(ROUNDS):
        # The products have 64 bits: taken in halves of the counter, so that int64 holds every step.
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _product(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = factor * (word & 0xFFFF), factor * (word >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def exponential_reference(seed: int, position: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """E_i of every token: float32 [vocab_size], each above 0."""
    index = torch.arange(-(-vocab_size // 4), device=device)
    words = (index, torch.full_like(index, position & _WORD), torch.full_like(index, position >> 32))
    counter = torch.stack((*words, torch.zeros_like(index)), dim=-1)
    bits = philox_reference((seed & _WORD, (seed >> 32) & _WORD), counter).flatten()[:vocab_size]
    return (-torch.log(((bits >> 8).float() + 0.5) * 2.0**-24)).clamp_(min=LEAST_NOISE)


def filter_reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The row's logits over the temperature, -inf where a filter removes the token. `logits` float32 [vocab]."""
    scaled = logits / temperature
    if 0 < top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], float("-inf"))
    if top_p < 1.0:
        ordered, order = scaled.sort(descending=True, stable=True)  # of equal ones the lowest id first
        masses = ordered.double().softmax(-1)
        beyond = masses.cumsum(-1) - masses >= top_p  # the mass before a token already reaches top_p
        beyond[0] = False
        scaled = scaled.masked_fill(beyond.new_zeros(scaled.shape).scatter(0, order, beyond), float("-inf"))
    if min_p > 0.0:
        probabilities = scaled.softmax(-1)
        scaled = scaled.masked_fill(probabilities < min_p * probabilities.max(), float("-inf"))
    return scaled


def sample_reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token at `position`: the winner of the race among those that the filters leave."""
    probabilities = filter_reference(logits, temperature, top_k, top_p, min_p).softmax(-1)
    noise = exponential_reference(seed, position, logits.numel(), logits.device)
    return int((probabilities / noise).argmax())
