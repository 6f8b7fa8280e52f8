"""Worker processes that exist only as messages: they answer when the test lets them, die, and come back.

Each has an inbox and an outbox in order, as a connection has; between workers nothing is ordered. The next
token is a function of the whole sequence, so a stream that lost, doubled or swapped a token goes wrong from
there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.coordinator_core import EOS, CoreDriver, stats
from support.jobs import told
from twinpool.config import Role
from twinpool.coordinator.events import FromWorker
from twinpool.messages import (
    Cancel,
    Dropped,
    Generate,
    Granted,
    HandoffReport,
    Heartbeat,
    LinkReady,
    Message,
    Peers,
    Prefill,
    PrefillReport,
    PromptLogprobs,
    PushTo,
    Reserve,
    StartAnew,
    StepTokens,
    Stop,
    Token,
)
from twinpool.request import FinishReason, Job, RequestKey, TokenLogprobs


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the fake model gives after `token_ids`; about one in forty is EOS."""
    value = (sum(token_ids) * 31 + len(token_ids) * 17) % 997
    return EOS if value % 40 == 0 else 10 + value


def told_of_prompt(job: Job) -> tuple[TokenLogprobs, ...]:
    """What the fake model tells of the prompt's tokens, if it is asked."""
    num_top = job.sampling.prompt_logprobs
    return () if num_top is None else tuple(told(token_id, num_top) for token_id in job.token_ids[1:])


def expected_tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a client must get when nothing ends the answer early."""
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_tokens and (len(sequence) == len(prompt) or sequence[-1] != EOS):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


@dataclass
class Task:
    """A job on a worker. `peer` is the process at the other end of its hand-off."""

    job: Job
    peer: str = ""
    sequence: list[int] = field(default_factory=list)
    is_granted: bool = False
    is_computed: bool = False
    is_running: bool = False


class Process:
    """One worker process."""

    def __init__(self, worker_id: str, role: Role, incarnation: str) -> None:
        self.worker_id = worker_id
        self.role = role
        self.incarnation = incarnation
        self.tasks: dict[RequestKey, Task] = {}
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    def read(self) -> None:
        """Takes one message in."""
        match self.inbox.popleft():
            case Prefill(job=job) | Generate(job=job):
                self.tasks[job.key] = Task(job)
            case Reserve(job=job, prefill_incarnation=peer):
                self.tasks[job.key] = Task(job, peer)
            case PushTo(key=key, decode_incarnation=peer):
                if (task := self.tasks.get(key)) is not None:
                    task.peer, task.is_granted = peer, True
            case Cancel(key=key):
                self.tasks.pop(key, None)
                self.outbox.append(Dropped(key, "cancelled"))
            case Peers(peers=peers):
                self._peers_are({p.incarnation for p in peers})
            case _:
                pass

    def _peers_are(self, incarnations: set[str]) -> None:
        for key, task in list(self.tasks.items()):
            if task.peer and task.peer not in incarnations and not task.is_running:
                self.drop(key, "transfer")

    def drop(self, key: RequestKey, reason: str) -> None:
        """Gives a task up."""
        del self.tasks[key]
        self.outbox.append(Dropped(key, reason))

    def sample(self, task: Task) -> Token:
        """The task's next token; the task goes when it ends with it."""
        token_id = next_token(task.sequence)
        index = len(task.sequence) - task.job.num_prompt
        task.sequence.append(token_id)
        finish = task.job.finish_reason(index, token_id)
        if finish is not None:
            del self.tasks[task.job.key]
        num_top = task.job.sampling.logprobs
        logprobs = None if num_top is None else told(token_id, num_top)
        return Token(task.job.key, index, token_id, finish, logprobs)

    def compute_prompt(self, key: RequestKey) -> None:
        """Prefill (or colocated): the prompt, and one token."""
        task = self.tasks[key]
        task.sequence = list(task.job.token_ids)
        task.is_computed = True
        task.is_running = self.role is Role.COLOCATED
        self.outbox.append(PrefillReport(key, 0.0, 0.0, 0, len(task.sequence), 1))
        if task.job.wants_prompt_logprobs:
            self.outbox.append(PromptLogprobs(key, told_of_prompt(task.job)))
        self.outbox.append(StepTokens((self.sample(task),)))

    def step(self) -> None:
        """Decode (or colocated): one token for everything that runs."""
        running = [task for task in self.tasks.values() if task.is_running]
        self.outbox.append(StepTokens(tuple(self.sample(task) for task in running)))


class Pools:
    """All processes, and what each could do next."""

    def __init__(self, driver: CoreDriver, workers: dict[str, Role]) -> None:
        self.driver = driver
        self.roles = workers
        self.processes: dict[str, Process] = {}
        self._starts = 0
        for worker_id in workers:
            self.start(worker_id)

    def start(self, worker_id: str) -> None:
        """A new process of that name registers; prefill processes link with all decode processes, either way
        round.
        """
        self._starts += 1
        role = self.roles[worker_id]
        self.driver.join(worker_id, role, str(self._starts))
        self.processes[worker_id] = Process(worker_id, role, self.driver.incarnations[worker_id])
        for prefill in self._of(Role.PREFILL):
            for decode in self._of(Role.DECODE):
                report = LinkReady(decode.worker_id, decode.incarnation, "loopback", 1.0, 1)
                self.driver.do(FromWorker(prefill.worker_id, prefill.incarnation, report))
        self.collect()

    def kill(self, worker_id: str, num_on_the_way: int, *, is_noticed: bool) -> None:
        """The process dies; its first `num_on_the_way` unread messages still arrive."""
        process = self.processes.pop(worker_id)
        for message in list(process.outbox)[:num_on_the_way]:
            self.driver.do(FromWorker(process.worker_id, process.incarnation, message))
        if is_noticed:
            self.driver.lose(worker_id)
        self.collect()

    def _of(self, role: Role) -> list[Process]:
        return [p for p in self.processes.values() if p.role is role]

    def collect(self) -> None:
        """Puts what the coordinator sent into the inboxes of the processes that live."""
        for send in self.driver.sent:
            process = self.processes.get(send.worker_id)
            if process is not None and process.incarnation == send.incarnation:
                process.inbox.append(send.message)
        self.driver.sent.clear()

    def choices(self) -> list[tuple[str, str, RequestKey | None]]:
        """All that can happen now, as (what, worker, task)."""
        found: list[tuple[str, str, RequestKey | None]] = []
        for name, process in self.processes.items():
            if process.inbox:
                found.append(("read", name, None))
            if process.outbox:
                found.append(("arrive", name, None))
            for key, task in process.tasks.items():
                if process.role is not Role.DECODE and not task.is_computed:
                    found.append(("compute", name, key))
                if process.role is Role.DECODE and not task.is_granted:
                    found.append(("grant", name, key))
                if process.role is Role.PREFILL and task.is_computed and task.is_granted:
                    found.append(("hand off", name, key))
            if any(task.is_running for task in process.tasks.values()):
                found.append(("step", name, None))
        return found

    def act(self, what: str, name: str, key: RequestKey | None) -> None:
        """Lets one of `choices` happen."""
        process = self.processes[name]
        if what == "read" and isinstance(process.inbox[0], Stop | StartAnew):
            self.kill(name, len(process.outbox), is_noticed=True)
        elif what == "read":
            process.read()
        elif what == "arrive":
            self.driver.do(FromWorker(name, process.incarnation, process.outbox.popleft()))
            self.collect()
        elif what == "step":
            process.step()
        elif key is not None and what == "compute":
            process.compute_prompt(key)
        elif key is not None and what == "grant":
            process.tasks[key].is_granted = True
            process.outbox.append(Granted(key, 1, (0,), 0, 0.0))
        elif key is not None:
            self._hand_off(process, key)

    def _hand_off(self, process: Process, key: RequestKey) -> None:
        task = process.tasks.pop(key)
        for decode in self._of(Role.DECODE):
            if decode.incarnation == task.peer and (there := decode.tasks.get(key)) is not None:
                there.sequence = list(task.sequence)
                there.is_running = True
                decode.outbox.append(HandoffReport(key, "loopback", 1, 0.0, 0.0, 1, 0))
                return
        process.outbox.append(Dropped(key, "transfer"))

    def heartbeats(self) -> None:
        """Every live process is heard."""
        for process in self.processes.values():
            message = Heartbeat(stats(steps_total=1.0))
            self.driver.do(FromWorker(process.worker_id, process.incarnation, message))
        self.collect()

    def run_until_quiet(self) -> None:
        """Restarts what is dead and lets everything happen until nothing is left to do."""
        for worker_id in self.roles:
            if worker_id not in self.processes:
                self.start(worker_id)
        self.collect()
        for _ in range(100_000):
            if choices := self.choices():
                self.act(*choices[0])
            elif len(self.driver.core.queue):
                self.heartbeats()
                self.driver.advance(0.2)  # somebody has just preempted and is left alone
                self.collect()
            else:
                return
        raise AssertionError("the pools never become quiet")


def is_answered(finish: FinishReason | None) -> bool:
    """Whether the stream ended with an answer rather than an error."""
    return finish in (FinishReason.STOP, FinishReason.LENGTH)
