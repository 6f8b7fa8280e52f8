"""The bounded queue: who may wait, in which order, and what a refused client is told."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from twinpool.config import CoordinatorConfig
from twinpool.coordinator.lifecycle import Request
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.service import Submission
from twinpool.errors import ContextLengthExceeded, InvalidRequest, NoWorker, QueueFull, RequestError

RATE_WINDOW_S = 10.0
MIN_BUSY_S = 0.5


class ServiceRate:
    """How fast the queue moves while somebody waits in it.

    Requests and prompt tokens that left the queue for a worker, over the time in which it was not empty; both
    decay with e^(−busy time / `RATE_WINDOW_S`), so the rate is that of about the last ten busy seconds. Idle
    time says nothing about what the workers could do and is left out.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._busy_s = 0.0
        self._requests = 0.0
        self._tokens = 0.0

    def advance(self, now: float, is_busy: bool) -> None:
        """Until `now` the queue was busy, or not."""
        elapsed_s = now - self._at
        self._at = now
        if is_busy and elapsed_s > 0:
            keep = math.exp(-elapsed_s / RATE_WINDOW_S)
            self._busy_s = self._busy_s * keep + elapsed_s
            self._requests *= keep
            self._tokens *= keep

    def left_queue(self, num_tokens: int) -> None:
        """One request with that many prompt tokens was dispatched after waiting."""
        self._requests += 1
        self._tokens += num_tokens

    def seconds_for(self, num_requests: int, num_tokens: int) -> float | None:
        """Predicted time until that many requests and tokens have left; None without enough evidence."""
        if self._busy_s < MIN_BUSY_S or self._requests < 0.5:
            return None
        return self._busy_s * max(num_requests / self._requests, num_tokens / max(1.0, self._tokens))


class WaitingQueue:
    """Requests that wait for workers, first come first served; a resumed one goes in front.

    The bounds hold for new requests. Resumed ones were admitted once already and are at most those in flight.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._num_tokens: dict[str, int] = {}
        self.num_tokens = 0
        """Prompt tokens (and tokens to be computed again) that wait."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def first(self) -> Request:
        """The next to go. The queue must not be empty."""
        return next(iter(self._requests.values()))

    def append(self, request: Request) -> None:
        """Puts a new request at the end."""
        self._requests[request.request_id] = request
        self._num_tokens[request.request_id] = request.num_tokens
        self.num_tokens += request.num_tokens

    def push_front(self, request: Request) -> None:
        """Puts a resumed request before all others."""
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Takes the request out, wherever it stands."""
        del self._requests[request.request_id]
        self.num_tokens -= self._num_tokens.pop(request.request_id)


class Admission:
    """Says yes or no to a new request."""

    def __init__(
        self, config: CoordinatorConfig, registry: Registry, queue: WaitingQueue, rate: ServiceRate
    ) -> None:
        self._config = config
        self._registry = registry
        self._queue = queue
        self._rate = rate

    def refusal(self, submission: Submission) -> RequestError | None:
        """Why the request must not be admitted now, or None."""
        is_ready, why = self._registry.ready()
        if not is_ready:
            return NoWorker(f"the server cannot run requests now: {why}")
        return self._never_fits(submission) or self._no_room(len(submission.prompt_token_ids))

    def _never_fits(self, submission: Submission) -> RequestError | None:
        num_prompt, max_tokens = len(submission.prompt_token_ids), submission.sampling.max_tokens
        if num_prompt == 0:
            return InvalidRequest("the prompt has no tokens; give at least one", param="prompt")
        if max_tokens < 1:
            return InvalidRequest(f"max_tokens is {max_tokens}; give 1 or more", param="max_tokens")
        total = num_prompt + max_tokens
        max_model_len = self._registry.max_model_len()
        if max_model_len is not None and total > max_model_len:
            return ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens and {max_tokens} output tokens are asked for, {total} "
                f"in all; the model's context is {max_model_len}: shorten the prompt or lower max_tokens",
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

    def _no_room(self, num_prompt: int) -> QueueFull | None:
        queue, config = self._queue, self._config
        over_requests = len(queue) + 1 - config.max_queue_requests
        over_tokens = queue.num_tokens + num_prompt - config.max_queue_tokens
        if over_requests > 0:
            what = f"{len(queue)} requests wait already and at most {config.max_queue_requests} may"
        elif over_tokens > 0 and len(queue):
            what = (
                f"{queue.num_tokens} prompt tokens wait already, this request has {num_prompt}, and at most "
                f"{config.max_queue_tokens} may wait"
            )
        else:
            wait_s = self._rate.seconds_for(len(queue), queue.num_tokens) if len(queue) else None
            if wait_s is None or wait_s <= config.max_wait_s:
                return None
            what = f"the predicted wait is {wait_s:.0f} s and at most {config.max_wait_s:g} s are allowed"
            return QueueFull(f"the server is busy: {what}", retry_after_s=wait_s - config.max_wait_s)
        # Nobody waits longer than max_wait_s, so there is room by then whatever the rate.
        predicted = self._rate.seconds_for(max(over_requests, 0), max(over_tokens, 0))
        retry_after_s = config.max_wait_s if predicted is None else min(predicted, config.max_wait_s)
        return QueueFull(f"the server is busy: {what}", retry_after_s=retry_after_s)
