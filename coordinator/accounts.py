"""What each tenant has used up and been served: quotas with continuous refill, and the counter that fairness is by.

Quotas hold prompt tokens and `max_tokens` from the moment of admission, and give back at the end what was not used: a
tenant never gets more than its quota, whatever it claims or leaves early, and the time in `Retry-After` can only
get shorter, by what running requests give back.

Fairness is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with
weights: tokens served over weight, prompt and output tokens alike; the least served goes next (`waiting.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from twinpool.coordinator.tenants import Allowance, Allowances, Tenant
from twinpool.errors import InvalidRequest, QuotaExceeded, RequestError

QUOTA_S = 60.0
RECENT_S = 60.0
"""A tenant that has asked for something so recently keeps its share of the queue free from others."""
ROUNDING = 1e-6
"""Less than this is no amount: what refilling in many small steps may lack."""
LATEST_ANSWER_WEIGHT = 1 / 16
"""What the latest answer counts for in the mean length of a tenant's answers."""


class Bucket:
    """An amount per minute: full at first, refilled continuously, never above one minute's worth."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` can be taken, if nobody else takes any; 0: now. `amount` is at most `per_minute`."""
        missing = amount - self._refilled(now)
        return 0.0 if missing <= ROUNDING else missing * QUOTA_S / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, whether or not there is so much."""
        self._level = self._refilled(now) - amount

    def give_back(self, amount: float, now: float) -> None:
        """Returns what was taken and not used."""
        self._level = min(self._refilled(now) + amount, self.per_minute)

    def num_left(self, now: float) -> int:
        """How much can be taken now, rounded down. Changes nothing."""
        return max(0, math.floor(self._level_at(now) + ROUNDING))

    def allowance(self, now: float) -> Allowance:
        """How much is left, and in how many seconds all of it is there again. Changes nothing."""
        left = self._level_at(now)
        return Allowance(self.per_minute, left, (self.per_minute - left) * QUOTA_S / self.per_minute)

    def _refilled(self, now: float) -> float:
        self._level, self._at = self._level_at(now), now
        return self._level

    def _level_at(self, now: float) -> float:
        return min(self._level + (now - self._at) * self.per_minute / QUOTA_S, self.per_minute)


class Account:
    """One tenant's books.

    `service` is the tokens that it was served, over its weight; the queue lifts it when the tenant comes back from
    idleness. It is the same whether tokens are counted one by one or many at once. `expected_output` is the mean length
    of its latest answers, in tokens.
    """

    def __init__(self, tenant: Tenant, now: float = 0.0) -> None:
        self.tenant = tenant
        self._lifted_to = 0.0
        self._num_served_since = 0
        self.expected_output = 0.0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.asks(tenant, now)

    def asks(self, tenant: Tenant, now: float) -> None:
        """The tenant sends a request. From now on its quotas and weight are those of `tenant`."""
        self.asked_at = now
        if tenant.weight != self.tenant.weight:
            self.service = self.service  # what was served so far counts by the old weight
        self.tenant = tenant
        self._requests = _of_size(self._requests, tenant.requests_per_minute, now)
        self._tokens = _of_size(self._tokens, tenant.tokens_per_minute, now)

    @property
    def service(self) -> float:
        """The tokens that the tenant was served, over its weight."""
        return self._lifted_to + self._num_served_since / self.tenant.weight

    @service.setter
    def service(self, service: float) -> None:
        self._lifted_to, self._num_served_since = service, 0

    def serve(self, num_tokens: int) -> None:
        """Prompt tokens went to a worker, or output tokens to the client."""
        self._num_served_since += num_tokens

    def never_allows(
        self, num_prompt: int, max_tokens: int, *, num_after: int = 0, tokens_after: int = 0
    ) -> RequestError | None:
        """Why no wait could help a request with so many prompt and, at most, output tokens, and those that belong to
        it."""
        if self._requests is not None and 1 + num_after > self._requests.per_minute:
            return InvalidRequest(
                f"{1 + num_after} answers are asked for, and each counts as a request; the quota is "
                f"{self._requests.per_minute} requests per minute: ask for fewer at once",
                param="n",
            )
        total = num_prompt + max_tokens + tokens_after
        if self._tokens is None or total <= self._tokens.per_minute:
            return None
        if num_after:
            return InvalidRequest(
                f"{1 + num_after} answers are asked for, which take up to {total} tokens; the quota is "
                f"{self._tokens.per_minute} tokens per minute: ask for fewer at once, or lower max_tokens",
                param="n",
            )
        return InvalidRequest(
            f"the prompt has {num_prompt} tokens and {max_tokens} output tokens are asked for, {total} in all; "
            f"the quota is {self._tokens.per_minute} tokens per minute: shorten the prompt or lower max_tokens",
            param="max_tokens",
        )

    def refusal(self, num_tokens: int, now: float, *, num_requests: int = 1) -> QuotaExceeded | None:
        """Why requests that take `num_tokens` at most must wait, and for how long; None if they need not."""
        if self._requests is None and self._tokens is None:
            return None
        waits = [
            (wait_s, f"of {bucket.per_minute} {unit} per minute {bucket.num_left(now)} are left, and {asked}")
            for bucket, amount, unit, asked in (
                (self._requests, num_requests, "requests", f"this asks for {num_requests}"),
                (self._tokens, num_tokens, "tokens", f"this takes up to {num_tokens}"),
            )
            if bucket is not None and (wait_s := bucket.seconds_until(amount, now))
        ]
        if not waits:
            return None
        wait_s, what = max(waits)
        return QuotaExceeded(f"{what}; there is enough in {wait_s:.1f} s", retry_after_s=wait_s)

    def admit(self, num_tokens: int, now: float) -> None:
        """A request that takes `num_tokens` at most is in."""
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def give_back(self, num_tokens: int, now: float) -> None:
        """Returns tokens that were taken at admission and not used."""
        if self._tokens is not None:
            self._tokens.give_back(num_tokens, now)

    def allowances(self, now: float) -> Allowances:
        """What is left of the tenant's quotas. Changes nothing."""
        return Allowances(
            None if self._requests is None else self._requests.allowance(now),
            None if self._tokens is None else self._tokens.allowance(now),
        )

    def answered(self, num_output_tokens: int) -> None:
        """Takes the length of an answer into `expected_output`."""
        self.expected_output += (num_output_tokens - self.expected_output) * LATEST_ANSWER_WEIGHT


class Accounts:
    """The accounts of all tenants that have asked for something: as many at most as the operator has made."""

    def __init__(self) -> None:
        self._by_name: dict[str, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_name.values())

    def of(self, tenant: Tenant, now: float) -> Account:
        """The account of the tenant, who asks for something now."""
        account = self._by_name.get(tenant.name)
        if account is None:
            account = self._by_name[tenant.name] = Account(tenant, now)
        else:
            account.asks(tenant, now)
        return account

    def allowances(self, tenant: Tenant, now: float) -> Allowances:
        """What is left of the tenant's quotas: all, if it has not asked for anything yet. Changes nothing."""
        account = self._by_name.get(tenant.name) or Account(tenant, now)
        return account.allowances(now)

    def give_back(self, tenant: str, num_tokens: int, now: float) -> None:
        """Returns tokens that a tenant, which has an account, was admitted with and has not used."""
        self._by_name[tenant].give_back(num_tokens, now)

    def share(self, account: Account, now: float) -> float:
        """The part of the queue that the account may fill: its part of the weight of all tenants that asked for
        something within `RECENT_S`. One that is alone may fill all of it.
        """
        recent = (a.tenant.weight for a in self if a is account or now - a.asked_at <= RECENT_S)
        return account.tenant.weight / sum(recent)


def _of_size(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    """`bucket`, or a full one if the quota is another than before."""
    if per_minute is None:
        return None
    return bucket if bucket is not None and bucket.per_minute == per_minute else Bucket(per_minute, now)
