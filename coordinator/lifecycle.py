"""A request's life: one table of states, what each owns, and the moves between them.

What a move releases is what the state it leaves owns and the state it enters does not; the core acts on
exactly that.

DRAINING is the state after the client's last output: nothing more is wanted, but a worker may still hold
blocks. It ends when every worker has let go, so a request in a terminal state owns nothing anywhere. Blocks
of an attempt that was given up (a request that is resumed) belong to no state: they are open legs without a
future, each counted at its worker until that says Dropped or is lost, and a request cannot end before the
last of them is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from twinpool.coordinator.accounts import Account
from twinpool.coordinator.service import Submission
from twinpool.coordinator.timeline import Timeline
from twinpool.errors import InvariantViolation
from twinpool.messages import Token
from twinpool.request import Job, RequestKey, RequestState, TokenLogprobs

if TYPE_CHECKING:
    from twinpool.coordinator.worker import Worker


class Resource(StrEnum):
    """What a request can own."""

    QUEUE_SLOT = "queue slot"
    PREFILL_BLOCKS = "prefill blocks"
    DECODE_RESERVATION = "decode reservation"
    OUTPUT_BUFFER = "output buffer"


class Move(StrEnum):
    """What can happen to a request. The last four decide its outcome: made once to enter DRAINING, and again to leave
    it.
    """

    VALIDATE = "validate"
    TOKENIZE = "tokenize"
    ADMIT = "admit"
    REJECT = "reject"
    DISPATCH = "dispatch"
    PREFILLED = "prefilled"
    PREFILLED_IN_PLACE = "prefilled in place"
    HAND_OFF = "hand off"
    RESUME = "resume"
    FINISH = "finish"
    CANCEL = "cancel"
    TIME_OUT = "time out"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class StateRule:
    """What a state owns, and where each move that it allows leads."""

    owns: frozenset[Resource]
    moves: Mapping[Move, RequestState]


def _rule(owns: set[Resource], moves: dict[Move, RequestState]) -> StateRule:
    return StateRule(frozenset(owns), moves)


_S, _R, _M = RequestState, Resource, Move
_END = {_M.CANCEL: _S.DRAINING, _M.TIME_OUT: _S.DRAINING, _M.FAIL: _S.DRAINING}
_RUNS = {**_END, _M.FINISH: _S.DRAINING, _M.RESUME: _S.QUEUED}
_ON_BOTH = {_R.PREFILL_BLOCKS, _R.DECODE_RESERVATION, _R.OUTPUT_BUFFER}

# Before QUEUED a request is not known to anybody else, so all that can end it is a refusal, in the call that
# brings it. FINISH out of QUEUED: a stop string completed the answer while the request waits to be resumed.
TABLE: Mapping[RequestState, StateRule] = {
    _S.RECEIVED: _rule(set(), {_M.VALIDATE: _S.VALIDATED, _M.REJECT: _S.REJECTED}),
    _S.VALIDATED: _rule(set(), {_M.TOKENIZE: _S.TOKENIZED, _M.REJECT: _S.REJECTED}),
    _S.TOKENIZED: _rule(set(), {_M.ADMIT: _S.QUEUED, _M.REJECT: _S.REJECTED}),
    _S.QUEUED: _rule(
        {_R.QUEUE_SLOT, _R.OUTPUT_BUFFER}, {_M.DISPATCH: _S.PREFILLING, _M.FINISH: _S.DRAINING, **_END}
    ),
    _S.PREFILLING: _rule(
        _ON_BOTH, {_M.PREFILLED: _S.TRANSFERRING, _M.PREFILLED_IN_PLACE: _S.DECODING, **_RUNS}
    ),
    _S.TRANSFERRING: _rule(_ON_BOTH, {_M.HAND_OFF: _S.DECODING, **_RUNS}),
    _S.DECODING: _rule({_R.DECODE_RESERVATION, _R.OUTPUT_BUFFER}, _RUNS),
    _S.DRAINING: _rule(
        {_R.PREFILL_BLOCKS, _R.DECODE_RESERVATION},
        {
            _M.FINISH: _S.COMPLETED,
            _M.CANCEL: _S.CANCELLED,
            _M.TIME_OUT: _S.TIMED_OUT,
            _M.FAIL: _S.FAILED,
        },
    ),
    _S.COMPLETED: _rule(set(), {}),
    _S.REJECTED: _rule(set(), {}),
    _S.TIMED_OUT: _rule(set(), {}),
    _S.CANCELLED: _rule(set(), {}),
    _S.FAILED: _rule(set(), {}),
}


class LegKind(StrEnum):
    """What an attempt does on a worker."""

    PREFILL = "prefill"
    """Computes the prompt and hands its KV over."""
    DECODE = "decode"
    """Takes the KV and goes on from the first token."""
    GENERATE = "generate"
    """Both, on a colocated worker or a hybrid."""


class Leg(msgspec.Struct, eq=False):
    """One attempt's claim on one worker: open from the message that starts it to the worker's last word.

    `num_tokens` are the KV slots it is predicted to fill; `pending_tokens` those of its prompt that are not
    computed yet. After a Cancel was sent at `cancelled_at`, only Dropped or the loss of the worker closes it.
    """

    kind: LegKind
    key: RequestKey
    worker: Worker
    request: Request
    num_tokens: int
    pending_tokens: int
    cancelled_at: float | None = None


class Request:
    """One request at the coordinator.

    `account` is its tenant's. `emitted` are the output tokens that went out, in order; `early` those that came before
    their turn (the two workers' connections race), by index. `prompt_logprobs` are those that the present attempt has
    told, until the first token takes them along. `queued_at` is when it began to wait, and has not got anywhere since.
    `number` is its place in the order in which requests first came to the queue. Of the present attempt,
    `num_emitted_at_start` is how many tokens were out when it began, and `handed_off` whether its decode worker has the
    KV. `ending` is the move that decided the outcome. `arrears` books tokens that it has got, where that is put off
    (`lockstep.py`).
    """

    def __init__(self, submission: Submission, account: Account) -> None:
        self.submission = submission
        self.request_id = submission.request_id
        """The gateway's name for it."""
        self.account = account
        self.number = 0
        self.state = RequestState.RECEIVED
        self.timeline = Timeline(
            submission.request_id, len(submission.prompt_token_ids), submission.tenant.name
        )
        self.timeline.stamps.append((RequestState.RECEIVED, submission.received_at))
        self.emitted: list[int] = []
        self.early: dict[int, Token] = {}
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.last_token_at = submission.received_at
        self.attempt = 0
        self.uncharged_attempts: set[int] = set()
        self.num_emitted_at_start = 0
        self.handed_off = False
        self.queued_at = submission.tokenized_at
        self.legs: list[Leg] = []
        self.prefix: Sequence[int] = ()
        self.ending: Move | None = None
        self.arrears: Callable[[], None] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far: what the next attempt has to prefill."""
        return len(self.submission.prompt_token_ids) + len(self.emitted)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its client is to get the log probabilities of the prompt's tokens, and has none yet."""
        return self.submission.sampling.prompt_logprobs is not None and not self.emitted

    @property
    def starts_charged(self) -> int:
        """Attempts that count against `max_attempts`: all but those that ended for lack of room."""
        return self.attempt - len(self.uncharged_attempts)

    @property
    def max_slots(self) -> int:
        """KV slots of the longest that it can become; the last output token is never fed back."""
        return len(self.submission.prompt_token_ids) + self.submission.sampling.max_tokens - 1

    @property
    def ends_with_first_token(self) -> bool:
        """Whether the next attempt's first token is sure to be the last: no worker decodes it."""
        return len(self.emitted) + 1 >= self.submission.sampling.max_tokens

    def job(self, eos_token_ids: tuple[int, ...]) -> Job:
        """The work order for the present attempt."""
        prompt = self.submission.prompt_token_ids
        return Job(
            request_id=self.request_id,
            attempt=self.attempt,
            token_ids=(*prompt, *self.emitted) if self.emitted else prompt,
            sampling=self.submission.sampling,
            eos_token_ids=eos_token_ids,
            num_emitted=len(self.emitted),
            cache_salt=self.submission.cache_salt,
        )

    def leg(self, kind: LegKind) -> Leg | None:
        """The present attempt's open leg of this kind."""
        for leg in self.legs:
            if leg.kind is kind and leg.key.attempt == self.attempt:
                return leg
        return None

    def move(self, move: Move, now: float) -> frozenset[Resource]:
        """Enters the state that `move` leads to, and says what the request no longer owns.

        Raises:
            InvariantViolation: the table has no such move, or a terminal state is entered while a worker holds
                something.
        """
        rule = TABLE[self.state]
        target = rule.moves.get(move)
        if target is None:
            raise self._violation(f"{move.value!r} is no move out of {self.state}")
        if target.is_terminal and self.legs:
            raise self._violation(f"{target} while workers hold {len(self.legs)} legs")
        self.state = target
        self.timeline.stamps.append((target, now))
        return rule.owns - TABLE[target].owns

    def catch_up(self) -> None:
        """Books all tokens that it has got. Whoever looks at them while it runs calls this before."""
        if self.arrears is not None:
            self.arrears()

    def forget_outputs(self) -> None:
        """Drops what the present attempt has told and the client has not got."""
        self.early.clear()
        self.prompt_logprobs = None

    def give_up(self, now: float) -> None:
        """Enters DRAINING whatever the table says: a rule was broken, and nothing more is wanted of the request."""
        self.state = RequestState.DRAINING
        self.timeline.stamps.append((self.state, now))

    def _violation(self, what: str) -> InvariantViolation:
        return InvariantViolation(f"{what}: {self.story()}", request_id=self.request_id)

    def story(self) -> str:
        """Everything that happened to it, in one line."""
        start = self.timeline.received_at
        stamps = " → ".join(f"{state} +{at - start:.3f}s" for state, at in self.timeline.stamps)
        legs = (
            ", ".join(f"{leg.kind} {leg.worker.worker_id} attempt {leg.key.attempt}" for leg in self.legs)
            or "none"
        )
        return (
            f"request {self.request_id}: {stamps}; attempt {self.attempt}, {len(self.emitted)} tokens out, "
            f"{len(self.early)} early; open legs: {legs}; ending {self.ending or 'none'}"
        )
