"""Output tokens on their way to the client: in order of index, each once, whatever order the workers' connections
bring them in.
"""

from __future__ import annotations

from collections.abc import Callable

from twinpool.coordinator.custody import Custody
from twinpool.coordinator.events import Command, Emit
from twinpool.coordinator.lifecycle import Leg, LegKind, Move, Request
from twinpool.coordinator.service import Output
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.timeline import Attempt
from twinpool.messages import PromptLogprobs, Token
from twinpool.metrics import CoordinatorMetric, Timing
from twinpool.request import RequestState

PROTOCOL = "protocol"


class Delivery:
    """Takes tokens of present attempts and emits those whose turn it is; `emit` takes commands in order."""

    def __init__(self, custody: Custody, tally: Tally, emit: Callable[[Command], None]) -> None:
        self._custody = custody
        self._tally = tally
        self._emit = emit
        self._itl = tally.timings[Timing.ITL]

    def take_prompt_logprobs(self, leg: Leg, message: PromptLogprobs, now: float) -> None:
        """What a worker has found out about the prompt: kept for the client's first output. What was not asked for, or
        is of another number of tokens, is a fault."""
        request = leg.request
        wanted = len(request.submission.prompt_token_ids) - 1
        is_awaited = (
            request.wants_prompt_logprobs
            and leg.kind is not LegKind.DECODE
            and request.state is RequestState.PREFILLING
            and request.prompt_logprobs is None
        )
        if is_awaited and len(message.entries) == wanted:
            request.prompt_logprobs = message.entries
        else:
            what = f"log probabilities of {len(message.entries)} prompt tokens"
            self._refuse(leg, f"{what}, wanted are {wanted if is_awaited else 'none'}", now)

    def take(self, leg: Leg, token: Token, now: float) -> None:
        """A worker's token of the present attempt: emitted if it is its turn, kept if it is early, else a fault."""
        if self.is_plain(leg, token):
            leg.worker.grew(leg)
            self._go_on(leg.request, token, now)
            return
        request, index = leg.request, token.index
        expected = len(request.emitted)
        if leg.kind is LegKind.PREFILL:
            leg.worker.prompt_computed(leg)
        else:
            leg.worker.grew(leg)
        if index < expected or index in request.early:
            self._tally.add(CoordinatorMetric.DUPLICATE_TOKENS)
            self._custody.note_fault(f"token {index} of {leg.worker.worker_id} came twice: {request.story()}")
            return
        is_first = request.state is RequestState.PREFILLING
        if leg.kind is LegKind.DECODE and is_first:
            # Two connections race: decode's tokens may overtake prefill's first one, and wait for it here.
            in_turn = request.handed_off and index == expected + 1 + len(request.early)
        else:
            in_turn = index == expected and (is_first or leg.kind is not LegKind.PREFILL)
            in_turn &= leg.kind is not LegKind.DECODE or request.handed_off
        if not in_turn:
            self._refuse(leg, f"token {index} out of turn", now)
            return
        if (token.logprobs is None) != (request.submission.sampling.logprobs is None):
            self._refuse(
                leg, f"token {index} with{'out' if token.logprobs is None else ''} log probabilities", now
            )
            return
        if not index and request.wants_prompt_logprobs and request.prompt_logprobs is None:
            self._refuse(leg, "the first token and no log probabilities of the prompt's", now)
            return
        if token.finish is not None:
            self._custody.close(leg)  # its worker has released everything
        if index == expected:
            self._deliver(request, token, now)
        else:
            request.early[index] = token

    def is_plain(self, leg: Leg, token: Token) -> bool:
        """Whether it is the token's turn in a stream that runs and goes on, and there is nothing else to deliver."""
        request = leg.request
        return (
            request.state is RequestState.DECODING
            and token.index == len(request.emitted)
            and token.finish is None
            and token.logprobs is None
            and request.submission.sampling.logprobs is None
            and not request.early
            and leg.kind is not LegKind.PREFILL
        )

    def count_plain(self, request: Request, now: float) -> None:
        """What is counted of such a token."""
        self._itl.observe(now - request.last_token_at)
        self._custody.serve(request, 1)
        self._tally.add(CoordinatorMetric.TOKENS_DELIVERED)

    def _go_on(self, request: Request, token: Token, now: float) -> None:
        """What `_deliver` comes to for nearly all tokens."""
        self.count_plain(request, now)
        request.last_token_at = now
        request.emitted.append(token.token_id)
        request.timeline.num_output_tokens = token.index + 1
        self._emit(Emit(request.request_id, Output((token.token_id,), token.index)))

    def _deliver(self, request: Request, token: Token, now: float) -> None:
        """Emits `token`, whose turn it is, and those that waited for it."""
        first_index = len(request.emitted)
        token_ids = [token.token_id]
        logprobs = () if token.logprobs is None else (token.logprobs,)
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if request.state is RequestState.PREFILLING:
            self._compare(request.timeline.attempts[-1], now)
        if token.finish is None and request.state is RequestState.PREFILLING:
            self._prefilled(request, now)
        while follower := request.early.pop(first_index + len(token_ids), None):
            token = follower
            token_ids.append(token.token_id)
            if token.logprobs is not None:
                logprobs = (*logprobs, token.logprobs)
        if request.timeline.first_token_at is None:
            request.timeline.first_token_at = now
        else:
            self._itl.observe(now - request.last_token_at)
        for _ in token_ids[1:]:
            self._itl.observe(0.0)
        request.last_token_at = now
        request.emitted += token_ids
        request.timeline.num_output_tokens = len(request.emitted)
        self._custody.serve(request, len(token_ids))
        self._tally.add(CoordinatorMetric.TOKENS_DELIVERED, amount=len(token_ids))
        output = Output(tuple(token_ids), first_index, token.finish, None, logprobs, prompt_logprobs)
        self._emit(Emit(request.request_id, output))
        if token.finish is not None:
            self._custody.end(request, Move.FINISH, token.finish, now, is_silent=True)

    def _refuse(self, leg: Leg, what: str, now: float) -> None:
        """The worker has sent what it must not: its attempt is lost."""
        self._custody.fault(f"{leg.worker.worker_id} sent {what}: {leg.request.story()}")
        self._custody.resume(leg.request, PROTOCOL, now)

    def _compare(self, attempt: Attempt, now: float) -> None:
        """The attempt's first token is there: was that predicted?"""
        attempt.first_token_s = now - attempt.started_at
        if attempt.predictions:
            error_s = abs(attempt.first_token_s - attempt.predictions[0].first_token_s)
            self._tally.timings[Timing.PREDICTION_ERROR].observe(error_s)

    def _prefilled(self, request: Request, now: float) -> None:
        if request.leg(LegKind.GENERATE) is not None:
            self._custody.move(request, Move.PREFILLED_IN_PLACE, now)
            return
        self._custody.move(request, Move.PREFILLED, now)
        if request.handed_off:
            self._custody.move(request, Move.HAND_OFF, now)
