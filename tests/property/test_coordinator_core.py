"""Any order of arrivals, answers, deaths and restarts keeps the coordinator's promises."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.coordinator_core import EOS, CoreDriver, submission
from support.coordinator_pools import Pools, expected_tokens, is_answered, told_of_prompt
from support.jobs import told

from twinpool.config import Role
from twinpool.coordinator.events import Arrived
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, Job

SPLIT = {"P0": Role.PREFILL, "P1": Role.PREFILL, "D0": Role.DECODE, "D1": Role.DECODE}
COLOCATED = {"K0": Role.COLOCATED, "K1": Role.COLOCATED}


class Coordination(RuleBasedStateMachine):
    """Clients, two workers of each pool (or two colocated ones), and faults."""

    @initialize(
        roles=st.sampled_from((SPLIT, COLOCATED)),
        max_attempts=st.integers(1, 3),
        max_in_flight=st.sampled_from((None, 1, 3)),
    )
    def start(self, roles: dict[str, Role], max_attempts: int, max_in_flight: int | None) -> None:
        self.driver = CoreDriver(max_attempts=max_attempts, max_in_flight=max_in_flight, max_queue_requests=6)
        self.pools = Pools(self.driver, roles)
        self.wanted: dict[str, list[int]] = {}
        self.jobs: dict[str, Job] = {}
        self.completed: set[str] = set()
        self.num_submitted = 0

    @rule(
        num_prompt=st.sampled_from((1, 5, 70, 200)),
        max_tokens=st.integers(1, 6),
        first=st.integers(0, 3),
        asked=st.sampled_from(({}, {}, {"logprobs": 1}, {"logprobs": 0, "prompt_logprobs": 2})),
    )
    def submit(self, num_prompt: int, max_tokens: int, first: int, asked: dict[str, int]) -> None:
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        request = submission(request_id, num_prompt, max_tokens, self.driver.now - 0.003, first, asked)
        self.driver.do(Arrived(request))
        self.pools.collect()
        if request_id not in self.driver.refusals:
            self.wanted[request_id] = expected_tokens(request.prompt_token_ids, max_tokens)
            self.jobs[request_id] = Job(request_id, 1, request.prompt_token_ids, request.sampling, (EOS,))

    @precondition(lambda self: self.pools.choices())
    @rule(data=st.data(), repeat=st.integers(1, 6))
    def workers_go_on(self, data: st.DataObject, repeat: int) -> None:
        for _ in range(repeat):
            if choices := self.pools.choices():
                self.pools.act(*choices[data.draw(st.integers(0, len(choices) - 1))])

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        self.driver.abandon(data.draw(st.sampled_from(sorted(self.wanted))))
        self.pools.collect()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.driver.finish(request_id) is None:
            self.completed.add(request_id)
        self.driver.complete(len(self.driver.tokens(request_id)), request_id)
        self.pools.collect()

    @precondition(lambda self: any(p.tasks for p in self.pools.processes.values()))
    @rule(data=st.data(), reason=st.sampled_from(("preempted", "no_room", "transfer", "deadline")))
    def worker_drops_a_task(self, data: st.DataObject, reason: str) -> None:
        held = [(p, key) for p in self.pools.processes.values() for key in p.tasks]
        process, key = held[data.draw(st.integers(0, len(held) - 1))]
        process.drop(key, reason)

    @precondition(lambda self: self.pools.processes)
    @rule(data=st.data(), num_on_the_way=st.integers(0, 3), is_noticed=st.booleans())
    def worker_dies(self, data: st.DataObject, num_on_the_way: int, is_noticed: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.pools.processes)))
        self.pools.kill(worker_id, num_on_the_way, is_noticed=is_noticed)

    @precondition(lambda self: len(self.pools.processes) < len(self.pools.roles))
    @rule(data=st.data())
    def worker_comes_back(self, data: st.DataObject) -> None:
        dead = sorted(self.pools.roles.keys() - self.pools.processes.keys())
        self.pools.start(data.draw(st.sampled_from(dead)))

    @rule(seconds=st.sampled_from((0.05, 1.0, 4.0)))
    def time_passes(self, seconds: float) -> None:
        self.pools.heartbeats()
        self.driver.advance(seconds)
        self.pools.collect()

    @invariant()
    def streams_are_right_so_far(self) -> None:
        for request_id, wanted in self.wanted.items():
            tokens = self.driver.tokens(request_id)
            assert tokens == wanted[: len(tokens)]
            if is_answered(self.driver.finish(request_id)):
                assert tokens == wanted

    @invariant()
    def log_probabilities_come_with_their_tokens(self) -> None:
        for request_id, job in self.jobs.items():
            asked = job.sampling
            outputs = [output for output in self.driver.outputs.get(request_id, ()) if output.token_ids]
            for output in outputs:
                num_top = asked.logprobs
                wanted = () if num_top is None else tuple(told(token, num_top) for token in output.token_ids)
                assert output.logprobs == wanted
            prompts = [output.prompt_logprobs for output in outputs]
            first = None if asked.prompt_logprobs is None else told_of_prompt(job)
            assert prompts == [first, *[None] * (len(outputs) - 1)][: len(outputs)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for _ in range(len(self.wanted) + 2):
            self.pools.run_until_quiet()
            self.pools.heartbeats()
            self.driver.advance(4.0)
            self.pools.collect()
        self.pools.run_until_quiet()
        self.driver.assert_empty()
        for request_id in self.wanted:
            assert self.driver.state(request_id).is_terminal
            ended = self.driver.finish(request_id) is not None
            assert ended or request_id in self.completed
        ends = sum(self.driver.core.tally.counts(CoordinatorMetric.REQUESTS).values())
        assert ends == self.num_submitted
        delivered = sum(len(self.driver.tokens(r)) for r in self.wanted)
        assert self.driver.count(CoordinatorMetric.TOKENS_DELIVERED) == delivered
        served = sum(self.driver.core.tally.counts(CoordinatorMetric.TENANT_TOKENS).values())
        prompts = (self.driver.core.timeline(r) for r in self.wanted)
        assert served == delivered + sum(t.num_prompt_tokens for t in prompts if t is not None and t.attempts)
        assert self.driver.count(CoordinatorMetric.DUPLICATE_TOKENS) == 0
        assert self.driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 0
        errors = [r for r in self.wanted if self.driver.finish(r) is FinishReason.ERROR]
        assert all(self.driver.outputs[r][-1].error is not None for r in errors)


Coordination.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestCoordination = Coordination.TestCase
