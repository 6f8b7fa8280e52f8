"""Who gets in, and what a refused client is told.

A request is refused for good (400) if no wait could help it: it is too long for the model, a pool or the tenant's
quota, or its deadline is too near. It is refused for now (429) if there is no room, quota or time for it at present.
`Retry-After` is then the longest of the waits that were found, so a client that comes back after it gets in, all else
equal.

A tenant may fill the queue up to its share (`accounts.py`), so nobody can keep others out.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.bounds import MOST_PROMPT_LOGPROBS
from twinpool.config import CoordinatorConfig
from twinpool.coordinator.accounts import Account, Accounts
from twinpool.coordinator.lifecycle import Request
from twinpool.coordinator.pace import Pace, PrefillPace, Stays
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.service import Submission
from twinpool.coordinator.waiting import Ahead, WaitingQueue
from twinpool.errors import (
    ContextLengthExceeded,
    DeadlineUnmeetable,
    InvalidRequest,
    NoWorker,
    QueueFull,
    RequestError,
    TryLater,
)


class Admission:
    """Says yes or no to a new request. `pace` is how the queue moves, `prefill` how prompts are computed, `stays` how
    long requests were with workers."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        queue: WaitingQueue,
        accounts: Accounts,
        stays: Stays,
    ) -> None:
        self._config = config
        self._registry = registry
        self._queue = queue
        self._accounts = accounts
        self._stays = stays
        self.pace = Pace()
        self.prefill = PrefillPace()

    def refusal(self, request: Request, num_cached: int, now: float) -> RequestError | None:
        """Why the request must not be admitted now, or None. Workers hold `num_cached` of its prompt tokens."""
        submission, account = request.submission, request.account
        num_prompt, max_tokens = len(submission.prompt_token_ids), submission.sampling.max_tokens
        if (no_worker := self._no_worker()) is not None:
            return no_worker
        num_to_compute = num_prompt - num_cached
        never = (
            self._never_fits(num_prompt, max_tokens)
            or _too_much_to_tell(submission)
            or account.never_allows(
                num_prompt, max_tokens, num_after=submission.num_after, tokens_after=submission.tokens_after
            )
            or self._never_in_time(submission, num_to_compute, now)
        )
        if never is not None:
            return never
        wait_s = self.predicted_wait_s(account, submission.priority, now)
        found: list[TryLater | None] = [
            account.refusal(
                num_prompt + max_tokens + submission.tokens_after, now, num_requests=1 + submission.num_after
            ),
            *self._no_room(num_prompt, account, now),
        ]
        if wait_s is not None:
            found += [self._too_long(wait_s), self._too_late(submission, wait_s, num_to_compute, now)]
        return _longest(found)

    def refusal_of_any(self, account: Account, priority: int, now: float) -> RequestError | None:
        """Why no request of that tenant and priority would be admitted now, whatever its prompt; None if one may be."""
        if (no_worker := self._no_worker()) is not None:
            return no_worker
        wait_s = self.predicted_wait_s(account, priority, now)
        too_long = None if wait_s is None else self._too_long(wait_s)
        return _longest([account.refusal(0, now), *self._no_room(0, account, now), too_long])

    def predicted_wait_s(self, account: Account, priority: int, now: float) -> float | None:
        """How long a new request of that tenant would wait in the queue; None without evidence."""
        if not len(self._queue):
            return 0.0
        ahead = self._queue.ahead_of(account, priority)
        return self.pace.seconds_for(ahead.num_requests + 1, ahead.num_tokens, now)

    def waited_in_vain(self, now: float) -> RequestError:
        """Why a request waited for `max_wait_s` without being run: all workers are busy, or there are none."""
        max_wait_s = self._config.max_wait_s
        can_run, missing = self._registry.can_run()
        if not can_run:
            return NoWorker(f"the request could not be run for {max_wait_s:g} s: {missing}")
        predicted_s = self.pace.seconds_for(len(self._queue), self._queue.num_tokens, now)
        return QueueFull(
            f"no worker was free for {max_wait_s:g} s; try again later, or start more workers",
            retry_after_s=max_wait_s if predicted_s is None else min(predicted_s, max_wait_s),
        )

    def _no_worker(self) -> NoWorker | None:
        can_run, why = self._registry.can_run()
        return None if can_run else NoWorker(f"the server cannot run requests now: {why}")

    def _never_fits(self, num_prompt: int, max_tokens: int) -> RequestError | None:
        if num_prompt == 0:
            return InvalidRequest("the prompt has no tokens; give at least one", param="prompt")
        if max_tokens < 1:
            return InvalidRequest(f"max_tokens is {max_tokens}; give 1 or more", param="max_tokens")
        total = num_prompt + max_tokens
        max_model_len = self._registry.max_model_len()
        if max_model_len is not None and total > max_model_len:
            return ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens and {max_tokens} output tokens are asked for, {total} "
                f"in all; this model's maximum context length is {max_model_len} tokens: shorten the prompt or lower "
                "max_tokens",
                param="max_tokens" if num_prompt < max_model_len else "prompt",
            )
        # The last output token is never fed back, so it needs no slot.
        if total - 1 > (slots := self._registry.largest_pool_tokens()):
            return InvalidRequest(
                f"the prompt has {num_prompt} tokens and {max_tokens} output tokens are asked for, which "
                f"takes {total - 1} KV slots; a worker has {slots}: shorten the prompt, lower max_tokens, "
                "or have the server started with a larger KV pool",
                param="max_tokens",
            )
        return None

    def _no_room(self, num_prompt: int, account: Account, now: float) -> list[QueueFull | None]:
        """The bounds in requests and prompt tokens: of the whole queue, and of the tenant's share of it."""
        if not len(self._queue):
            return []  # one may always wait
        config, share = self._config, self._accounts.share(account, now)
        most, most_tokens = config.max_queue_requests, config.max_queue_tokens
        everything = Ahead(len(self._queue), self._queue.num_tokens)
        own = self._queue.held_by(account)
        own_most, own_most_tokens = max(1, int(most * share)), int(most_tokens * share)
        return [
            self._full(everything, None, num_prompt, most, most_tokens, now),
            self._full(own, account, num_prompt, own_most, own_most_tokens, now),
        ]

    def _full(
        self, held: Ahead, account: Account | None, num_prompt: int, most: int, most_tokens: int, now: float
    ) -> QueueFull | None:
        """Why one request more is too much for that part of the queue: a tenant's share, or (None) all of it."""
        whose = "" if account is None else " of yours"
        over_requests = held.num_requests + 1 - most
        over_tokens = held.num_tokens + num_prompt - most_tokens if held.num_requests else 0
        if over_requests > 0:
            what = f"{held.num_requests} requests{whose} wait already and at most {most} may"
        elif over_tokens > 0:
            what = (
                f"{held.num_tokens} prompt tokens{whose} wait already, this request has {num_prompt}, and at most "
                f"{most_tokens} may wait"
            )
        else:
            return None
        ahead = self._queue.until_left(over_requests, over_tokens, account)
        wait_s = self.pace.seconds_for(ahead.num_requests + 1, ahead.num_tokens, now)
        if wait_s is None:  # nobody has waited for long enough to tell
            in_flight = self._registry.in_flight()
            wait_s = self._stays.seconds_until_left(ahead.num_requests + 1, in_flight)
        # Nobody waits longer than max_wait_s, so there is room by then whatever the rate.
        retry_after_s = self._config.max_wait_s if wait_s is None else min(wait_s, self._config.max_wait_s)
        return QueueFull(f"the server is busy: {what}", retry_after_s=retry_after_s)

    def _too_long(self, wait_s: float) -> QueueFull | None:
        """The bound in time."""
        over_s = wait_s - self._config.max_wait_s
        if over_s <= 0:
            return None
        allowed = f"at most {self._config.max_wait_s:g} s are allowed"
        what = f"the server is busy: the predicted wait is {wait_s:.1f} s and {allowed}"
        return QueueFull(what, retry_after_s=over_s)

    def _never_in_time(
        self, submission: Submission, num_to_compute: int, now: float
    ) -> InvalidRequest | None:
        """Why no wait can help: the deadline has passed, or comes before the prompt can be computed even at best."""
        if submission.deadline is None:
            return None
        least_s, left_s = self.prefill.least_seconds_for(num_to_compute), submission.deadline - now
        if least_s < left_s:
            return None
        if left_s <= 0:
            what = f"passed {-left_s:.3f} s before the request could be taken on; set a later one"
        else:
            at_best = f"the prompt takes {least_s:.3f} s at the best rate measured"
            what = f"is in {left_s:.3f} s, and {at_best}; set a later one, or shorten the prompt"
        return InvalidRequest(f"the deadline {what}", param="timeout")

    def _too_late(
        self, submission: Submission, wait_s: float, num_to_compute: int, now: float
    ) -> DeadlineUnmeetable | None:
        """Why the request would not have even its first token by its deadline."""
        if submission.deadline is None:
            return None
        left_s = submission.deadline - now
        wait_s += self.prefill.seconds_before(self._registry.least_pending_tokens())
        prefill_s = self.prefill.seconds_for(num_to_compute)
        over_s = wait_s + prefill_s - left_s
        if over_s <= 0:
            return None
        return DeadlineUnmeetable(
            f"the deadline is in {left_s:.2f} s; the predicted wait is {wait_s:.2f} s and the first token takes about "
            f"{prefill_s:.2f} s after it",
            retry_after_s=over_s,
        )


def _longest(found: Sequence[TryLater | None]) -> TryLater | None:
    refusals = [refusal for refusal in found if refusal is not None]
    return max(refusals, key=lambda refusal: refusal.retry_after_s, default=None)


def _too_much_to_tell(submission: Submission) -> InvalidRequest | None:
    """Why the log probabilities that are asked for are too many for one message; None if they are not."""
    num_prompt, num_top = len(submission.prompt_token_ids), submission.sampling.prompt_logprobs
    if num_top is None or num_prompt * (1 + num_top) <= MOST_PROMPT_LOGPROBS:
        return None
    return InvalidRequest(
        f"prompt_logprobs is {num_top} and the prompt has {num_prompt} tokens, {num_prompt * (1 + num_top)} log "
        f"probabilities in all; at most {MOST_PROMPT_LOGPROBS} are told: lower prompt_logprobs, or shorten the prompt",
        param="prompt_logprobs",
    )
