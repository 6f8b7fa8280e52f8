"""A coordinator core with a hand-turned clock, and workers whose messages the test writes itself."""

from __future__ import annotations

from typing import Any

from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import (
    Abandoned,
    Arrived,
    Cancelled,
    Command,
    Completed,
    Cut,
    Emit,
    Event,
    FromWorker,
    Note,
    Refuse,
    Send,
    Tick,
    WorkerLost,
)
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.state import CoordinatorCore
from twinpool.errors import RequestError
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    Granted,
    HandoffReport,
    Heartbeat,
    LinkReady,
    Message,
    PrefillReport,
    PromptLogprobs,
    Register,
    StepTokens,
    Token,
    WorkerStats,
)
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestKey, RequestState, SamplingParams, TokenLogprobs

EOS = 2
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=Dtype.FLOAT32)


def register(worker_id: str, role: Role, incarnation: str = "a", **changes: Any) -> Register:
    """A worker's offer: 64 blocks of 16, 4 sequences at a time, a context of 512."""
    values: dict[str, Any] = {
        "pid": 1,
        "endpoint": f"tcp://here/{worker_id}",
        "fingerprint": "model-1",
        "layout": LAYOUT,
        "num_blocks": 64,
        "max_model_len": 512,
        "max_num_seqs": 4,
    }
    return Register(worker_id=worker_id, incarnation=incarnation, role=role, **(values | changes))


def submission(
    request_id: str,
    num_prompt: int = 10,
    max_tokens: int = 4,
    at: float = 0.0,
    first: int = 100,
    sampling: dict[str, Any] | None = None,
    **more: Any,
) -> Submission:
    """A request of `num_prompt` tokens, received at `at`, validated 1 ms and tokenized 3 ms later. `sampling` has more
    of its parameters."""
    return Submission(
        request_id=request_id,
        prompt_token_ids=tuple(range(first, first + num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, **(sampling or {})),
        received_at=at,
        validated_at=at + 0.001,
        tokenized_at=at + 0.003,
        **more,
    )


def stats(**counters: float) -> WorkerStats:
    """An idle worker's counts."""
    return WorkerStats(
        free_blocks=64, owned_blocks=0, cached_blocks=0, quarantined_blocks=0, leased_blocks=0,
        waiting=0, running=0, waiting_tokens=7, counters=counters,
    )  # fmt: skip


class CoreDriver:
    """Feeds a core, checks its books after every event, and sorts what it answers."""

    def __init__(self, **settings: Any) -> None:
        self.core = CoordinatorCore(CoordinatorConfig(**settings), (EOS,))
        self.now = 1.0
        self.sent: list[Send] = []
        self.notes: list[Note] = []
        self.outputs: dict[str, list[Output]] = {}
        self.refusals: dict[str, RequestError] = {}
        self.incarnations: dict[str, str] = {}

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def do(self, event: Event) -> list[Command]:
        """One event; the core's books must balance after it."""
        commands = self.core.handle(event, self.now)
        self.core.check()
        for command in commands:
            match command:
                case Send():
                    self.sent.append(command)
                case Emit(request_id, output):
                    self._emitted(request_id, output)
                case Refuse(request_id, error):
                    self.refusals[request_id] = error
                case Note():
                    self.notes.append(command)
        return commands

    def _emitted(self, request_id: str, output: Output) -> None:
        outputs = self.outputs.setdefault(request_id, [])
        assert not outputs or outputs[-1].finish is None, "an output after the last one"
        assert output.first_index == len(self.tokens(request_id)), "a token is missing or came twice"
        outputs.append(output)

    def advance(self, seconds: float) -> None:
        """Lets time pass, with one tick at its end."""
        self.now += seconds
        self.do(Tick())

    def join(self, worker_id: str, role: Role, incarnation: str = "a", **changes: Any) -> None:
        """A worker registers."""
        self.incarnations[worker_id] = f"{worker_id}-{incarnation}"
        offer = register(worker_id, role, self.incarnations[worker_id], **changes)
        self.do(FromWorker(worker_id, self.incarnations[worker_id], offer))

    def link(self, prefill: str, decode: str, gb_per_s: float = 10.0) -> None:
        """The prefill worker reports its link."""
        self.say(prefill, LinkReady(decode, self.incarnations[decode], "loopback", gb_per_s, 1 << 20))

    def pair(self) -> None:
        """Prefill worker P and decode worker D, linked."""
        self.join("P", Role.PREFILL)
        self.join("D", Role.DECODE)
        self.link("P", "D")
        self.sent.clear()

    def say(self, worker_id: str, message: Message) -> None:
        """A message of that worker's present process."""
        self.do(FromWorker(worker_id, self.incarnations[worker_id], message))

    def lose(self, worker_id: str) -> None:
        """The worker process dies."""
        self.do(WorkerLost(worker_id, self.incarnations[worker_id], "killed"))

    def submit(self, request_id: str = "r", **values: Any) -> None:
        """A request arrives now."""
        self.do(Arrived(submission(request_id, at=self.now - 0.003, **values)))

    def abandon(self, request_id: str = "r") -> None:
        """Its client leaves."""
        self.do(Abandoned(request_id))

    def cancel(self, request_id: str = "r", tenant: str = "anyone") -> None:
        """A client of that tenant wants it to end."""
        self.do(Cancelled(request_id, tenant))

    def cut(self, error: RequestError, request_id: str = "r") -> None:
        """The gateway gives it up."""
        self.do(Cut(request_id, error))

    def complete(self, num_tokens: int, request_id: str = "r") -> None:
        """A stop string ends it."""
        self.do(Completed(request_id, num_tokens))

    # ── what workers say ────────────────────────────────────────────────────────────────────────────────────

    def token(
        self,
        worker_id: str,
        index: int,
        finish: FinishReason | None = None,
        attempt: int = 1,
        request_id: str = "r",
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """A step of one token; the token's id is 1000 + its index."""
        key = RequestKey(request_id, attempt)
        self.say(worker_id, StepTokens((Token(key, index, 1000 + index, finish, logprobs),)))

    def prompt_logprobs(self, worker_id: str, entries: tuple[TokenLogprobs, ...], attempt: int = 1) -> None:
        """What is known of the prompt's tokens."""
        self.say(worker_id, PromptLogprobs(RequestKey("r", attempt), entries))

    def grant(self, attempt: int = 1, worker_id: str = "D", request_id: str = "r") -> None:
        """Decode grants one block."""
        self.say(worker_id, Granted(RequestKey(request_id, attempt), 7, (3,), 0, 0.0))

    def report(
        self,
        attempt: int = 1,
        worker_id: str = "P",
        request_id: str = "r",
        num_cached: int = 0,
        num_computed: int = 10,
    ) -> None:
        """Prefill has computed the prompt."""
        key = RequestKey(request_id, attempt)
        self.say(worker_id, PrefillReport(key, 0.1, 0.2, num_cached, num_computed, 1))

    def handoff(
        self, attempt: int = 1, worker_id: str = "D", request_id: str = "r", num_blocks_cached: int = 0
    ) -> None:
        """Decode owns the request."""
        key = RequestKey(request_id, attempt)
        self.say(worker_id, HandoffReport(key, "loopback", 4096, 0.001, 0.0, 1, num_blocks_cached))

    def dropped(self, worker_id: str, reason: str, attempt: int = 1, request_id: str = "r") -> None:
        """The worker lets go."""
        self.say(worker_id, Dropped(RequestKey(request_id, attempt), reason))

    def heartbeat(self, *worker_ids: str) -> None:
        """Those workers are alive."""
        for worker_id in worker_ids:
            self.say(worker_id, Heartbeat(stats()))

    def answer_cancels(self) -> int:
        """Every live worker answers the Cancels that it got; returns how many there were."""
        cancels = [(s, s.message) for s in self.sent if isinstance(s.message, Cancel)]
        self.sent = [s for s in self.sent if not isinstance(s.message, Cancel)]
        for send, cancel in cancels:
            assert isinstance(cancel, Cancel)
            if self.incarnations.get(send.worker_id) == send.incarnation:
                self.do(FromWorker(send.worker_id, send.incarnation, Dropped(cancel.key, "cancelled")))
        return len(cancels)

    # ── what came out ───────────────────────────────────────────────────────────────────────────────────────

    def tokens(self, request_id: str = "r") -> list[int]:
        """All output tokens so far."""
        return [t for output in self.outputs.get(request_id, []) for t in output.token_ids]

    def finish(self, request_id: str = "r") -> FinishReason | None:
        """How the stream ended, or None."""
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish if outputs else None

    def state(self, request_id: str = "r") -> RequestState:
        """The request's present state."""
        timeline = self.core.timeline(request_id)
        assert timeline is not None
        return timeline.state

    def sent_to(self, worker_id: str) -> list[Message]:
        """Messages to that worker since `sent` was last cleared."""
        return [s.message for s in self.sent if s.worker_id == worker_id]

    def count(self, metric: CoordinatorMetric, label: str = "") -> int:
        """One of the core's counters."""
        return self.core.tally.count(metric, label)

    def assert_empty(self) -> None:
        """Nothing lives, waits or is held."""
        assert self.core.num_live == 0
        assert len(self.core.queue) == 0
        assert self.core.queue.num_tokens == 0
        for worker in self.core.registry:
            assert (worker.legs, worker.pending_tokens, worker.held_tokens) == ({}, 0, 0)
