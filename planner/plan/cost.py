"""What a request takes of an accelerator, and what that costs. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config import require

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Accelerator-seconds of one request: those of its prompt, and its share of the decode steps it is in."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Of both."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Cost:
    """In the unit of the price. Input tokens bear the cost of prefill's time, output tokens that of decode's; tokens
    that a prefix cache spared are input tokens as well."""

    per_request: float
    per_million_input: float
    per_million_output: float

    @property
    def per_thousand_requests(self) -> float:
        """Of a thousand."""
        return 1000 * self.per_request


def cost(
    price_per_hour: float, work: RequestWork, input_tokens: float, output_tokens: float, use: float = 1.0
) -> Cost:
    """The cost of a request on accelerators of `price_per_hour` each that work for `use` of the time they are paid for.

    Raises:
        ConfigError: the price is below 0, or `use` not in (0, 1].
    """
    require("--price", price_per_hour, price_per_hour >= 0, "0 or more an hour for each accelerator")
    require("use", use, 0 < use <= 1, "above 0, at most 1")
    per_s = price_per_hour / _SECONDS_PER_HOUR / use
    return Cost(
        per_request=per_s * work.total_s,
        per_million_input=1e6 * per_s * work.prefill_s / input_tokens,
        per_million_output=1e6 * per_s * work.decode_s / output_tokens,
    )
