"""Jobs, events and answers for tests of worker cores."""

from __future__ import annotations

from twinpool.engine.batch import StepOutput
from twinpool.request import Job, RequestKey, SamplingParams
from twinpool.worker.core import Command, SendCoordinator, SendPeer, StepDone, StepPlan

EOS = 7


def job(
    name: str,
    num_prompt: int,
    max_tokens: int = 8,
    *,
    first: int = 1000,
    num_emitted: int = 0,
    min_tokens: int = 0,
) -> Job:
    """A job whose prompt is `first`, `first` + 1, …; the last `num_emitted` of its tokens are output already."""
    return Job(
        request_id=name,
        attempt=0,
        token_ids=tuple(range(first, first + num_prompt + num_emitted)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, min_tokens=min_tokens),
        eos_token_ids=(EOS,),
        num_emitted=num_emitted,
    )


def done(plan: StepPlan, token: int = 50, **by_name: int) -> StepDone:
    """The plan has run: every slice that asked for a token got `token`, or the one that is given under its name."""
    tokens: dict[RequestKey, int] = {}
    for chunk in plan.batch.slices:
        if chunk.sampling:
            tokens[chunk.key] = by_name.get(chunk.key.request_id, token)
    return StepDone(plan, StepOutput(tokens, 0.01))


def messages(commands: list[Command]) -> list[object]:
    """What is sent, to the coordinator and to peers, in order."""
    return [c.message for c in commands if isinstance(c, SendCoordinator | SendPeer)]


def names(plan: StepPlan | None) -> list[str]:
    """Whose slices a plan has, in order."""
    return [chunk.key.request_id for chunk in plan.batch.slices] if plan else []
