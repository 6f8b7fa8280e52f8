"""Workers that have joined and talk nonsense: the coordinator's books stay right, and every request ends once."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import junk
from support.coordinator_core import CoreDriver, submission

from twinpool.config import Role
from twinpool.coordinator.events import Arrived, FromWorker, Shutdown
from twinpool.messages import (
    Dropped,
    Granted,
    HandoffReport,
    Heartbeat,
    Left,
    LinkFailed,
    LinkReady,
    Message,
    PrefillReport,
    PromptLogprobs,
    Register,
    StepTokens,
    decode,
    encode,
)
from twinpool.request import RequestState

FROM_WORKERS = (
    Register, LinkReady, LinkFailed, Heartbeat, Left, Granted, StepTokens, PromptLogprobs, PrefillReport, HandoffReport,
    Dropped,
)  # fmt: skip
SPLIT = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
MIXED = {"prefill-0": Role.COLOCATED, "decode-0": Role.COLOCATED}
LIVES = ("a", "b")

Said = tuple[str, str, Message]


def nonsense() -> st.SearchStrategy[Said]:
    """Who says it (perhaps nobody known), and what."""
    what = st.one_of(junk.messages(*FROM_WORKERS), junk.messages(*FROM_WORKERS), junk.messages())
    return st.tuples(st.sampled_from((*SPLIT, "ghost")), st.sampled_from((*LIVES, "")), what)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(
    roles=st.sampled_from((SPLIT, MIXED)),
    said=st.lists(nonsense(), max_size=25),
    max_tokens=st.integers(1, 4),
)
def test_no_nonsense_of_workers_breaks_the_books(
    roles: dict[str, Role], said: list[Said], max_tokens: int
) -> None:
    driver = CoreDriver(max_attempts=2)
    for worker_id, role in roles.items():
        driver.join(worker_id, role, incarnation=LIVES[0])
    if roles is SPLIT:
        driver.link("prefill-0", "decode-0")
    for request_id, sampling in (("r0", {}), ("r1", {"logprobs": 0, "prompt_logprobs": 1})):
        request = submission(
            request_id, num_prompt=2, max_tokens=max_tokens, at=driver.now, sampling=sampling
        )
        driver.do(Arrived(request))
    for worker_id, life, message in said:
        incarnation = f"{worker_id}-{life}" if life else "life-1"
        driver.do(FromWorker(worker_id, incarnation, decode(encode(message))))
    driver.advance(1.0)
    driver.do(Shutdown())
    for worker in list(driver.core.registry):
        driver.do(FromWorker(worker.worker_id, worker.incarnation, Left("done")))
    assert driver.core.num_live == 0
    for request_id in ("r0", "r1"):
        assert driver.state(request_id).is_terminal
        assert driver.state(request_id) is not RequestState.REJECTED
