"""A client: what it asks, how it behaves, and what it must get."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from twinpool.config import Role
from twinpool.coordinator.custody import HANDED_ON
from twinpool.coordinator.events import Abandoned, Arrived, Cancelled, Completed, Cut, Delivered
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.coordinator.timeline import Timeline
from twinpool.engine.stop_strings import StopMatcher
from twinpool.errors import ClientTooSlow, RequestError
from twinpool.request import FinishReason, Job, RequestState, SamplingParams
from world.model import EOS, answer, text, told_of
from world.schedule import Actor
from world.story import Broken

if TYPE_CHECKING:
    from world.coordinator import CoordinatorProcess
    from world.world import World

DEADLINE_SLACK_S = 0.15
"""The coordinator looks at deadlines with every tick."""
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)
STATE_OF = {
    FinishReason.STOP: RequestState.COMPLETED,
    FinishReason.LENGTH: RequestState.COMPLETED,
    FinishReason.CANCELLED: RequestState.CANCELLED,
    FinishReason.TIMEOUT: RequestState.TIMED_OUT,
    FinishReason.ERROR: RequestState.FAILED,
}


class Parting(StrEnum):
    """How a client ends its request before its answer is complete."""

    LEAVES = "leaves"
    CANCELS = "cancels"
    IS_CUT = "is cut"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and how its client behaves: it comes at `at_s`, takes `reads_every_s` between two looks at its stream,
    and ends it `parts_after_s` after it came, if `parting` says how."""

    request_id: str
    at_s: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: str = ""
    reads_every_s: float = 0.002
    parting: Parting | None = None
    parts_after_s: float = 0.0
    tenant: Tenant = ANYONE
    priority: int = 0
    time_limit_s: float | None = None

    def wanted(self) -> tuple[list[int], int]:
        """The undisturbed answer, and how many of its tokens are the client's: a stop string ends it."""
        whole = answer(Job(self.request_id, 0, self.prompt, self.sampling, (EOS,)))
        matcher = StopMatcher((self.stop,) if self.stop else ())
        for count, token in enumerate(whole, 1):
            matcher.add(text(token))
            if matcher.matched is not None:
                return whole, count
        return whole, len(whole)


class Client(Actor):
    """One request as its client, and the gateway that reads for it, see it."""

    def __init__(self, world: World, ask: Ask) -> None:
        super().__init__(ask.request_id)
        self.ask = ask
        self.whole, self.num_wanted = ask.wanted()
        self.num_emitted = 0
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.is_refused = False
        self.is_over = False
        self.ended_at = 0.0
        self._submitted_at = 0.0
        self._world = world
        self._coordinator: CoordinatorProcess | None = None
        self._unread: list[Output] = []
        self._is_reading = False
        self._is_completed = False
        self._has_parted = False
        self._matcher = StopMatcher((ask.stop,) if ask.stop else ())

    @property
    def is_answered(self) -> bool:
        """Whether it has what an undisturbed run gives, no more and no less."""
        return self.state is RequestState.COMPLETED and self.tokens == self.whole[: self.num_wanted]

    @property
    def state(self) -> RequestState:
        """How the request ended."""
        if self.is_refused:
            return RequestState.REJECTED
        return RequestState.COMPLETED if self.finish is None else STATE_OF[self.finish]

    # ── what it does ────────────────────────────────────────────────────────────────────────────────────────

    def submit(self) -> None:
        """The request arrives at the coordinator that runs now; without one the connection is refused."""
        now, ask, coordinator = self._world.schedule.now, self.ask, self._world.coordinator
        self._coordinator, self._submitted_at = coordinator, now
        coordinator.clients[ask.request_id] = self
        deadline = None if ask.time_limit_s is None else now + ask.time_limit_s
        submission = Submission(
            request_id=ask.request_id,
            prompt_token_ids=ask.prompt,
            sampling=ask.sampling,
            received_at=now,
            validated_at=now,
            tokenized_at=now,
            cache_salt="" if ask.tenant.shares_cache else ask.tenant.name,
            tenant=ask.tenant,
            priority=ask.priority,
            deadline=deadline,
        )
        coordinator.handle(Arrived(submission))
        if ask.parting is not None:
            self._world.schedule.after(ask.parts_after_s, self, self.part)

    def part(self) -> None:
        """Ends the request, in the way that is this client's, unless it has ended."""
        if self.is_over or self._coordinator is None:
            return
        self._has_parted = True
        request_id = self.ask.request_id
        match self.ask.parting:
            case Parting.LEAVES:
                self._coordinator.handle(Abandoned(request_id))
            case Parting.CANCELS:
                self._coordinator.handle(Cancelled(request_id, self.ask.tenant.name))
            case Parting.IS_CUT:
                self._coordinator.handle(Cut(request_id, ClientTooSlow("the client does not read")))

    def disconnect(self) -> None:
        """The coordinator has died: the stream breaks off, which no client takes for an answer."""
        self.is_over = True
        self.is_alive = False

    # ── what it gets ────────────────────────────────────────────────────────────────────────────────────────

    def refused(self, error: RequestError) -> None:
        """The coordinator does not admit it (or, asked to cancel it, does not know it)."""
        if self.is_over or self.num_emitted:
            raise Broken("one terminal output", f"{self.name} is refused after it was admitted: {error}")
        self.is_refused = self.is_over = True
        self.error, self.ended_at = error, self._world.schedule.now

    def emitted(self, output: Output) -> None:
        """The coordinator emits the next output: each token once, in order, the right one, and one terminal output."""
        if self.finish is not None or self._is_completed or self.is_refused:
            raise Broken("one terminal output", f"{self.name} gets {output} behind its end")
        if output.first_index != self.num_emitted:
            raise Broken(
                "each token once, in order", f"{self.name} has {self.num_emitted} tokens and gets {output}"
            )
        self.num_emitted += len(output.token_ids)
        if tuple(self.whole[output.first_index : self.num_emitted]) != output.token_ids:
            raise Broken("the same tokens", f"{self.name} gets {output}, wanted is {self.whole}")
        if self.num_emitted > self.most_tokens:
            raise Broken(
                "who cannot go on ends", f"{self.name} has {self.num_emitted} tokens of {self.most_tokens}"
            )
        self._check_told(output)
        self.finish, self.error = output.finish, output.error
        if self.finish is not None:
            self.ended_at = self._world.schedule.now
            self._check_finish()
        self._unread.append(output)
        if not self._is_reading:
            self._is_reading = True
            self._world.schedule.after(self.ask.reads_every_s, self, self._read)

    def _read(self) -> None:
        assert self._coordinator is not None
        self._is_reading = False
        unread, self._unread = self._unread, []
        for output in unread:
            if not self.tokens and output.token_ids:
                self._coordinator.handle(Delivered(self.name))
            for token in output.token_ids:
                self.tokens.append(token)
                self._matcher.add(text(token))
                if self._matcher.matched is not None:
                    self._is_completed = self.is_over = True
                    self._unread.clear()
                    self._coordinator.handle(Completed(self.name, len(self.tokens)))
                    return
            self.is_over = output.finish is not None

    # ── promises ────────────────────────────────────────────────────────────────────────────────────────────

    def _check_told(self, output: Output) -> None:
        """What comes beside the tokens, and nothing that was not asked for: each token's log probabilities, and with
        the first of all those of the prompt."""
        sampling, sequence = self.ask.sampling, (*self.ask.prompt, *self.whole[: self.num_emitted])
        first, is_first = len(self.ask.prompt) + output.first_index, output.first_index == 0
        wanted, of_prompt = (), None
        if sampling.logprobs is not None:
            wanted = told_of(sequence, first, sampling.logprobs)
        if sampling.prompt_logprobs is not None and is_first and output.token_ids:
            of_prompt = told_of(self.ask.prompt, 1, sampling.prompt_logprobs)
        if (output.logprobs, output.prompt_logprobs) != (wanted, of_prompt):
            raise Broken(
                "what is told of tokens", f"{self.name} gets {output}, wanted are {wanted} and {of_prompt}"
            )

    @property
    def most_tokens(self) -> int:
        """How many tokens it can get, if its grammar lets it have no more."""
        grammar = self.ask.sampling.grammar
        return len(self.whole) if grammar is None else min(len(self.whole), int(grammar.source))

    def _check_finish(self) -> None:
        if self.finish in ANSWERED:
            if self.num_emitted != len(self.whole) or self.error is not None:
                raise Broken("the same tokens", f"{self.name} ends with {self.num_emitted} of {self.whole}")
            return
        if self.error is None:
            raise Broken("an end says why", f"{self.name} ends as {self.finish} without an error")
        if self.finish is FinishReason.CANCELLED and not self._has_parted:
            raise Broken("an end says why", f"{self.name} is cancelled, and nobody asked for it")
        if "no token fits" in self.error.message and not self.error.message.endswith(
            f"at {self.most_tokens}"
        ):
            raise Broken("an end says why", f"{self.name} of {self.most_tokens}: {self.error.message}")

    def check_end(self, core: CoordinatorCore, sent_back: set[int]) -> None:
        """At the end: the coordinator's record of the request is what the client saw, and its attempts were bounded.

        Those that a worker has `sent_back` for lack of room do not count.
        """
        if self.is_refused:
            return
        timeline = core.timeline(self.name)
        if timeline is None or timeline.state is not self.state:
            raise Broken("one terminal state", f"{self.name} saw {self.state}, recorded is {timeline}")
        self._check_facts(timeline)
        num_billed = len(self.tokens) if self._is_completed else self.num_emitted
        if timeline.num_output_tokens != num_billed:
            raise Broken(
                "usage once", f"{self.name} got {num_billed}, billed are {timeline.num_output_tokens}"
            )
        if self._is_completed and len(self.tokens) != self.num_wanted:
            raise Broken("stop strings", f"{self.name} ends at {len(self.tokens)}, wanted {self.num_wanted}")
        limit_s = self.ask.time_limit_s
        if limit_s is not None and self.ended_at > self._submitted_at + limit_s + DEADLINE_SLACK_S:
            raise Broken("deadlines hold", f"{self.name} had {limit_s} s and ended at {self.ended_at}")
        self._check_attempts(timeline, sent_back)

    def _check_facts(self, timeline: Timeline) -> None:
        facts = timeline.facts(self._world.schedule.now, self._world.scenario.block_size)
        found = (facts.num_cached_tokens, facts.num_computed_tokens)
        if sum(found) != (len(self.ask.prompt) if self.num_emitted else 0):
            raise Broken(
                "cached and computed are the prompt", f"{self.name} of {len(self.ask.prompt)}: {facts}"
            )
        if self.ask.sampling.prompt_logprobs is not None and facts.num_cached_tokens:
            raise Broken("what is told of was computed", f"{self.name}: {facts}")
        if Role.COLOCATED in self._world.scenario.pools and facts.num_transferred_tokens:
            raise Broken("only what moves is counted", f"{self.name}: {facts}")

    def _check_attempts(self, timeline: Timeline, sent_back: set[int]) -> None:
        handed_on = {a.number for a in timeline.attempts if a.ended.startswith(HANDED_ON)}
        charged = {attempt.number for attempt in timeline.attempts} - sent_back - handed_on
        if len(charged) > self._world.scenario.coordinator.max_attempts:
            raise Broken(
                "bounded attempts", f"{self.name} was started {len(charged)} times: {timeline.attempts}"
            )
