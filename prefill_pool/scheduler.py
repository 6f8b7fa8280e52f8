"""Which prompts a step computes, and how much of each: chunked, prefix-aware, shortest remaining first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinpool.config import SchedulerConfig
from twinpool.engine.batch import Scoring, SequenceSlice, StepOutput
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.look_back import LookBack
from twinpool.engine.prefix_chain import Chains, PrefixChain, chains_of
from twinpool.errors import InvariantViolation
from twinpool.messages import Message, PrefillReport, PromptLogprobs, Token
from twinpool.request import Job, RequestKey, TokenLogprobs

LEAST_SAVED_TOKENS = 64
"""Of prompts that share less a step computes both as fast as two steps one: it reads the weights once."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A job's tokens on their way into KV. Times are seconds on this worker's clock.

    `num_done` tokens have their KV in `table`; the first `num_cached` of them came from the prefix cache.
    `table` is None until the prompt is started, and then holds the blocks of the whole prompt. It came, or got on with
    computing, at `moved_at`. `scores` are what is known of the log probabilities of its tokens, from the second on, if
    the job asks for them.
    """

    job: Job
    chain: PrefixChain
    arrived_at: float
    look_back: LookBack | None = None
    num_cached: int = 0
    num_done: int = 0
    num_steps: int = 0
    started_at: float = 0.0
    table: BlockTable | None = None
    moved_at: float = 0.0
    scores: list[TokenLogprobs] = field(default_factory=list)
    key: RequestKey = field(init=False)
    num_tokens: int = field(init=False)
    """Tokens to have in KV."""

    def __post_init__(self) -> None:
        self.key, self.num_tokens = self.job.key, len(self.job.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens to compute; before the start, what the prefix cache promised when the prompt came."""
        return self.num_tokens - (self.num_done if self.table else self.num_cached)

    @property
    def is_done(self) -> bool:
        """Whether all its KV is in the table."""
        return self.num_done == self.num_tokens

    def scoring(self, start: int, end: int) -> Scoring | None:
        """What is asked for of the tokens that follow those at positions [start, end), as far as they are the
        prompt's; None if nothing is."""
        num_top = self.job.sampling.prompt_logprobs
        if num_top is None or not self.job.wants_prompt_logprobs:
            return None
        followers = self.job.token_ids[start + 1 : end + 1]
        return Scoring(followers, num_top) if followers else None

    def reports(self, now: float) -> list[Message]:
        """What is told before the first token, once the prompt is done: what it took, and what is asked for of its
        tokens."""
        report = PrefillReport(
            key=self.key,
            queue_s=self.started_at - self.arrived_at,
            compute_s=now - self.started_at,
            num_cached=self.num_cached,
            num_computed=self.num_tokens - self.num_cached,
            num_steps=self.num_steps,
        )
        if not self.job.wants_prompt_logprobs:
            return [report]
        return [report, PromptLogprobs(self.key, tuple(self.scores))]

    def first_token(self, output: StepOutput) -> Token:
        """The token that was sampled after the prompt, as the client gets it."""
        key, index = self.key, self.job.num_emitted
        token_id = output.token_ids[key]
        finish = self.job.finish_reason(index, token_id)
        return Token(key, index, token_id, finish, output.logprobs.get(key))


class Admission(Protocol):
    """Who decides beyond free blocks whether a prompt may start."""

    def may_start(self, prompt: Prompt, num_blocks: int) -> bool:
        """Whether `prompt`, which needs `num_blocks`, may start now."""
        ...

    def make_room(self, prompt: Prompt) -> bool:
        """The pool cannot hold `prompt`: releases something for it, or says False."""
        ...


class PrefillScheduler:
    """Prompts that wait and prompts that are under way, over one block pool.

    Order of a step: prompts older than `max_queue_age_s`, oldest first, in no more than half of the step if younger
    ones need the other half; then those with the fewest tokens left. A prompt starts with the blocks for all its tokens
    and `headroom_tokens` of growth, or not at all; once the first that wants to start does not fit, none behind it
    starts, so a long one is not starved of blocks. One of which half or more is just being computed, as the beginning
    of another, waits until it is cached: several answers to one prompt, and a burst of requests with one system prompt,
    compute it once. `chains` names the prefixes of jobs; None: by their tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        headroom_tokens: int = 0,
        chains: Chains | None = None,
    ) -> None:
        self._pool = pool
        self._chains = chains or chains_of(pool.block_size)
        self._max_age_s = config.max_queue_age_s
        self._shares_prefixes = config.prefix_cache
        self._headroom_tokens = headroom_tokens
        self._prompts: dict[RequestKey, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._prompts

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    @property
    def num_started(self) -> int:
        """Prompts under way."""
        return sum(1 for prompt in self._prompts.values() if prompt.table)

    @property
    def num_tokens_left(self) -> int:
        """Prompt tokens still to compute."""
        return sum(prompt.num_left for prompt in self._prompts.values())

    @property
    def oldest_at(self) -> float:
        """When the prompt came that has been here for longest; infinite if there is none."""
        return min((prompt.arrived_at for prompt in self._prompts.values()), default=math.inf)

    def add(self, job: Job, now: float) -> Prompt:
        """Queues the job.

        Raises:
            InvariantViolation: this attempt is queued already.
        """
        prompt = Prompt(job, self._chains(job), now, LookBack.of(job), moved_at=now)
        if prompt.key in self._prompts:
            raise InvariantViolation(f"{prompt.key} is queued twice")
        prompt.num_cached = self._pool.count_cached(self._usable(prompt)) * self._pool.block_size
        self._prompts[prompt.key] = prompt
        return prompt

    def withdraw(self, key: RequestKey) -> Prompt | None:
        """Plans nothing more of this prompt, which is returned if it is here. Its table is the caller's."""
        return self._prompts.pop(key, None)

    def plan(self, now: float, token_budget: int, admission: Admission) -> list[SequenceSlice]:
        """The chunks of one step, `token_budget` tokens at most together."""
        ranked = sorted(self._prompts.values(), key=lambda p: self._rank(p, now))
        num_kept = self._num_kept(ranked, token_budget, now)
        shares: list[tuple[Prompt, int]] = []
        starting = True
        for prompt in ranked:
            if not token_budget:
                break
            most = token_budget - (num_kept if self._is_old(prompt, now) else 0)
            if not most:
                continue
            if prompt.table is None:
                if self._is_soon_cached(prompt, now):
                    continue
                if not starting or not admission.may_start(prompt, self._num_blocks(prompt)):
                    continue
                if not self._try_start(prompt, now, admission):
                    starting = False
                    continue
            shares.append((prompt, min(prompt.num_left, most)))
            token_budget -= shares[-1][1]
        # What was kept for prompts that could not start then.
        slices = []
        for prompt, num_tokens in shares:
            more = min(prompt.num_left - num_tokens, token_budget)
            slices.append(self._slice(prompt, num_tokens + more))
            token_budget -= more
        return slices

    def complete(self, chunk: SequenceSlice, scores: Sequence[TokenLogprobs] = ()) -> Prompt:
        """The chunk's KV is in the blocks: the full ones become findable. `scores` are those of its `scoring`. A prompt
        that is done leaves the scheduler; its table is the caller's."""
        prompt = self._prompts[chunk.key]
        if prompt.table is None or chunk.start != prompt.num_done:
            raise InvariantViolation(
                f"{chunk.key} computed from {chunk.start}, but {prompt.num_done} are done"
            )
        num_scores = len(chunk.scoring.followers) if chunk.scoring else 0
        if len(scores) != num_scores:
            raise InvariantViolation(f"{chunk.key} asked for {num_scores} scores and got {len(scores)}")
        prompt.scores += scores
        prompt.num_done = chunk.end
        prompt.num_steps += 1
        self._pool.seal(prompt.table, prompt.chain, prompt.num_done)
        if prompt.is_done:
            del self._prompts[chunk.key]
        return prompt

    def unstart_youngest(self) -> bool:
        """Takes the blocks of the started prompt that came last, which waits again; False if there is none.

        Only between steps.
        """
        started = [prompt for prompt in self._prompts.values() if prompt.table]
        if not started:
            return False
        youngest = max(started, key=lambda p: p.arrived_at)
        if youngest.table:
            self._pool.release(youngest.table)
        youngest.table, youngest.num_done = None, 0
        youngest.scores.clear()
        return True

    def _is_soon_cached(self, prompt: Prompt, now: float) -> bool:
        """Whether prompts under way are computing half or more of what it lacks. One that is old enough waits no
        more."""
        if not self._shares_prefixes or self._is_old(prompt, now):
            return False
        under_way = [other for other in self._prompts.values() if other.table]
        if not under_way:
            return False
        usable = len(self._usable(prompt))
        num_shared = max(min(usable, prompt.chain.num_shared(other.chain)) for other in under_way)
        if not num_shared:
            return False
        num_cached = self._pool.count_cached(self._usable(prompt))
        num_saved = (num_shared - num_cached) * self._pool.block_size
        num_lacking = prompt.num_tokens - num_cached * self._pool.block_size
        return num_saved >= max(LEAST_SAVED_TOKENS, num_lacking / 2)

    def _is_old(self, prompt: Prompt, now: float) -> bool:
        return now - prompt.arrived_at >= self._max_age_s

    def _num_kept(self, ranked: Sequence[Prompt], token_budget: int, now: float) -> int:
        """Tokens of a step that old prompts leave to younger ones: a long one that is old delays no short one for
        longer than a step takes, and is itself at most twice as slow."""
        needed = sum(prompt.num_left for prompt in ranked if not self._is_old(prompt, now))
        return min(token_budget // 2, needed)

    def _rank(self, prompt: Prompt, now: float) -> tuple[bool, float, float]:
        if self._is_old(prompt, now):
            return False, prompt.arrived_at, 0
        return True, prompt.num_left, prompt.arrived_at

    def _usable(self, prompt: Prompt) -> list[bytes]:
        if prompt.job.wants_prompt_logprobs:
            return []  # each token's are of the logits before it, which no cache has
        # The last token is always computed: its logits are the first output token.
        return prompt.chain.digests[: (prompt.num_tokens - 1) // self._pool.block_size]

    def _num_blocks(self, prompt: Prompt) -> int:
        num_new = prompt.job.sampling.max_tokens - prompt.job.num_emitted - 1
        return self._pool.blocks_for(prompt.num_tokens + max(0, min(self._headroom_tokens, num_new)))

    def _try_start(self, prompt: Prompt, now: float, admission: Admission) -> bool:
        num_blocks, prefix = self._num_blocks(prompt), self._usable(prompt)
        while (table := self._pool.try_reserve(num_blocks, prefix)) is None:
            if not admission.make_room(prompt):
                return False
        prompt.table = table
        prompt.num_cached = prompt.num_done = table.num_cached * self._pool.block_size
        if not prompt.num_steps:
            prompt.started_at = now
        return True

    def _slice(self, prompt: Prompt, token_budget: int) -> SequenceSlice:
        job, start = prompt.job, prompt.num_done
        end = min(prompt.num_tokens, start + token_budget)
        last = end == prompt.num_tokens
        if prompt.table is None:
            raise InvariantViolation(f"{prompt.key} was planned without blocks")
        return SequenceSlice(
            prompt.key,
            job.token_ids[start:end],
            start,
            prompt.table.block_ids,
            job.sampling if last else None,
            job.banned_token_ids(job.num_emitted) if last else (),
            prompt.look_back,
            prompt.scoring(start, end),
        )
