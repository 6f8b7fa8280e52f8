"""Streams whose workers decode in lockstep, as in a simulation: what a step gives is booked once, not per token."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from twinpool.coordinator.accounts import Account
from twinpool.coordinator.custody import Custody
from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.events import Command, EmitRun
from twinpool.coordinator.lifecycle import Leg
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.worker import Worker
from twinpool.messages import LockstepTokens, Token
from twinpool.metrics import CoordinatorMetric, Timing
from twinpool.request import RequestKey, RequestState


@dataclass(slots=True)
class _Book:
    """One worker's streams. `times` are those of its steps. Each of `members` has been booked here since that step
    (from 0 on); `others` are taken token by token, and have that index next. `num_members` counts by account."""

    worker: Worker
    token_id: int
    times: array[float] = field(default_factory=lambda: array("d"))
    members: dict[RequestKey, int] = field(default_factory=dict)
    others: dict[RequestKey, int] = field(default_factory=dict)
    num_members: dict[Account, int] = field(default_factory=dict)


class Lockstep:
    """Takes `LockstepTokens`: afterwards all is as after the `StepTokens` that they stand for.

    A stream becomes a *member* with a token that comes in its turn while it is DECODING. From then on its request, leg
    and timeline stay as they were, and each step of its worker adds to what is counted over streams: slots held, tokens
    delivered and served, gaps between tokens (the last digits of their sum may differ). A token of its own brings a
    member up to date, and so does whoever looks at its request, by `Request.catch_up`: then it is a member no more,
    until its next token comes. The tokens since are emitted as one `EmitRun`, the one that made it a member among them,
    if there was nothing else to deliver with that.
    """

    def __init__(
        self, custody: Custody, delivery: Delivery, tally: Tally, emit: Callable[[Command], None]
    ) -> None:
        self._custody = custody
        self._delivery = delivery
        self._tally = tally
        self._itl = tally.timings[Timing.ITL]
        self._emit = emit
        self._books: dict[str, _Book] = {}

    def take(self, worker: Worker, message: LockstepTokens, now: float) -> None:
        """A step of the worker has ended."""
        book = self._books.get(worker.incarnation)
        if book is None:
            book = self._books[worker.incarnation] = _Book(worker, message.token_id)
        for key in message.left:
            self._close(book, key)
        for token in message.tokens:
            self._close(book, token.key)
        if book.members:
            self._count(book, now)
        book.times.append(now)
        if book.others:
            for key, index in list(book.others.items()):
                self._take_one(book, Token(key, index, message.token_id), now)
        for token in message.tokens:
            self._take_one(book, token, now)

    def take_quiet(self, worker: Worker, times: Sequence[float]) -> bool:
        """Steps have ended at these times in which only members had tokens. Says whether they were counted: not where
        there are others than members."""
        book = self._books.get(worker.incarnation)
        if book is None or book.others or not book.members:
            return False
        num = len(book.members)
        self._itl.observe_gaps(times, book.times[-1], num)
        book.times.extend(times)
        worker.held_tokens += num * len(times)
        self._tally.add(CoordinatorMetric.TOKENS_DELIVERED, amount=num * len(times))
        for account, num_here in book.num_members.items():
            self._custody.serve_account(account, num_here * len(times))
        return True

    def dropped(self, worker: Worker, key: RequestKey) -> None:
        """The worker lets go of the attempt."""
        if (book := self._books.get(worker.incarnation)) is not None:
            self._close(book, key)

    def end(self, worker: Worker) -> None:
        """The worker is lost, or tells its tokens one by one from now on."""
        if (book := self._books.pop(worker.incarnation, None)) is not None:
            for key in list(book.members):
                self._close(book, key)

    def catch_up(self) -> None:
        """Brings all members up to date, and leaves them members."""
        for book in self._books.values():
            for key in book.members:
                self._book_run(book, key)

    def _count(self, book: _Book, now: float) -> None:
        """One more token for each member: all had one in the step before."""
        num = len(book.members)
        book.worker.held_tokens += num
        self._itl.observe(now - book.times[-1], num)
        self._tally.add(CoordinatorMetric.TOKENS_DELIVERED, amount=num)
        for account, num_here in book.num_members.items():
            self._custody.serve_account(account, num_here)

    def _take_one(self, book: _Book, token: Token, now: float) -> None:
        key = token.key
        book.others.pop(key, None)
        leg = self._custody.leg_of(book.worker, key)
        if leg is not None and self._delivery.is_plain(leg, token):
            self._delivery.count_plain(leg.request, now)
            book.worker.hold(1)
            self._open(book, leg, len(book.times) - 1)
            return
        if leg is not None:
            self._delivery.take(leg, token, now)
        if token.finish is not None:
            return
        if leg is not None and _is_in_turn(leg, token):
            self._open(book, leg, len(book.times))
        else:
            book.others[key] = token.index + 1

    def _open(self, book: _Book, leg: Leg, since: int) -> None:
        """The stream is a member, and gets its tokens of the steps from `since` on as such."""
        request = leg.request
        book.members[leg.key] = since
        book.num_members[request.account] = book.num_members.get(request.account, 0) + 1
        request.arrears = partial(self._look, book, leg.key)

    def _look(self, book: _Book, key: RequestKey) -> None:
        """Somebody will look at the member, and may change it."""
        self._close(book, key)
        book.others[key] = len(book.worker.legs[key].request.emitted)

    def _close(self, book: _Book, key: RequestKey) -> None:
        """The stream is booked here no more, if it was."""
        if key not in book.members:
            book.others.pop(key, None)
            return
        self._book_run(book, key)
        del book.members[key]
        request = book.worker.legs[key].request
        request.arrears = None
        book.num_members[request.account] -= 1
        if not book.num_members[request.account]:
            del book.num_members[request.account]

    def _book_run(self, book: _Book, key: RequestKey) -> None:
        """The member gets the tokens of the steps since it was brought up to date."""
        first, last = book.members[key], len(book.times)
        if first == last:
            return
        book.members[key] = last
        leg = book.worker.legs[key]
        request = leg.request
        times = book.times[first:last]
        self._emit(
            EmitRun(book.worker.worker_id, request.request_id, book.token_id, len(request.emitted), times)
        )
        request.emitted += [book.token_id] * len(times)
        request.timeline.num_output_tokens = len(request.emitted)
        request.last_token_at = times[-1]
        leg.num_tokens += len(times)


def _is_in_turn(leg: Leg, token: Token) -> bool:
    """Whether the token went out, and the next one will if nothing else happens."""
    request = leg.request
    return (
        leg.cancelled_at is None
        and request.state is RequestState.DECODING
        and not request.early
        and len(request.emitted) == token.index + 1
    )
