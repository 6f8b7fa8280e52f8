"""Jobs, events and answers for tests of worker cores."""

from __future__ import annotations

from typing import Any

from twinpool.engine.batch import SequenceSlice, StepOutput
from twinpool.request import Grammar, GrammarKind, Job, RequestKey, SamplingParams, TokenLogprobs
from twinpool.worker.core import Command, SendCoordinator, SendPeer, StepDone, StepPlan

EOS = 7
GRAMMAR = Grammar(GrammarKind.REGEX, "[0-9]+")


def job(
    name: str,
    num_prompt: int,
    max_tokens: int = 8,
    *,
    first: int = 1000,
    num_emitted: int = 0,
    min_tokens: int = 0,
    **sampling: Any,
) -> Job:
    """A job whose prompt is `first`, `first` + 1, …; the last `num_emitted` of its tokens are output already. What else
    it asks for is in `sampling`."""
    return Job(
        request_id=name,
        attempt=0,
        token_ids=tuple(range(first, first + num_prompt + num_emitted)),
        sampling=SamplingParams(
            max_tokens=max_tokens, seed=0, temperature=0.0, min_tokens=min_tokens, **sampling
        ),
        eos_token_ids=(EOS,),
        num_emitted=num_emitted,
    )


def told(token_id: int, num_top: int) -> TokenLogprobs:
    """What a made-up model tells of a token."""
    return TokenLogprobs(-token_id / 8, tuple((token_id + place, -1.0 - place) for place in range(num_top)))


def scores(chunk: SequenceSlice) -> tuple[TokenLogprobs, ...]:
    """What it tells of the tokens that a slice's `scoring` is about."""
    asked = chunk.scoring
    return tuple(told(token_id, asked.num_top) for token_id in asked.followers) if asked else ()


def output(
    plan: StepPlan, token: int = 50, failed: tuple[RequestKey, ...] = (), **by_name: int
) -> StepOutput:
    """What a step gives: every slice that asked for a token gets `token`, or the one that is given under its name, and
    what is asked for beside; those in `failed` cannot go on."""
    found = StepOutput({}, 0.01)
    for chunk in plan.batch.slices:
        if chunk.key in failed:
            found.failed[chunk.key] = "no token fits its grammar"
        if chunk.scoring:
            found.scores[chunk.key] = scores(chunk)
        if (asked := chunk.sampling) is not None:
            token_id = found.token_ids[chunk.key] = by_name.get(chunk.key.request_id, token)
            if asked.logprobs is not None:
                found.logprobs[chunk.key] = told(token_id, asked.logprobs)
    return found


def done(plan: StepPlan, token: int = 50, failed: tuple[RequestKey, ...] = (), **by_name: int) -> StepDone:
    """The plan has run and gave that `output`."""
    return StepDone(plan, output(plan, token, failed, **by_name))


def messages(commands: list[Command]) -> list[object]:
    """What is sent, to the coordinator and to peers, in order."""
    return [c.message for c in commands if isinstance(c, SendCoordinator | SendPeer)]


def names(plan: StepPlan | None) -> list[str]:
    """Whose slices a plan has, in order."""
    return [chunk.key.request_id for chunk in plan.batch.slices] if plan else []
