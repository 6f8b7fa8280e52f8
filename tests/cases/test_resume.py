"""Resume: whatever happens to a stream's workers, it goes on as if nothing had, once, and is billed once.

Whatever sampling features come later join `FEATURES`, and with that go through every disturbance.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from support.fleet import Fleet, frozen, split_server
from support.server import Server, wait_for
from support.visitors import Answer, ask, stream

NUM_TOKENS = 240
TRIES = 3
WORDS = "(north|south|east)(,(north|south|east)){31}"
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 7},
    "top_p and allowed tokens": {
        "temperature": 1.1, "top_p": 0.8, "seed": 8, "allowed_token_ids": list(range(3, 300, 2)),
    },
    "top_k": {"temperature": 1.0, "top_k": 40, "seed": 9},
    "min_p and bad words": {
        "temperature": 0.9, "min_p": 0.02, "seed": 10, "bad_words": ["the", "fox", "e", "o b", "abc"],
    },
    "stop string": {},
    "stop token": {"temperature": 0.8, "seed": 11},
    "min_tokens": {"temperature": 1.3, "seed": 12, "min_tokens": NUM_TOKENS - 20, "ignore_eos": False},
    "json schema": {
        "temperature": 1.0,
        "seed": 13,
        "ignore_eos": False,
        "structured_outputs": {
            "json": {"type": "array", "items": {"type": "integer"}, "minItems": NUM_TOKENS}
        },
    },
    "regex": {"temperature": 1.0, "seed": 14, "ignore_eos": False, "structured_outputs": {"regex": WORDS}},
}  # fmt: skip
PROMPT = list(range(20, 140))
Undisturbed = dict[str, tuple[dict[str, Any], Answer]]
"""By feature: the request, and its answer."""


def late_stop(name: str, server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that end the answer in its last quarter, by what the model says there anyway."""
    whole = ask(server, **fields)
    if name == "stop string":
        place = len(whole.text) * 3 // 4
        return {"stop": [whole.text[place : place + 4]]}
    if name == "stop token":
        ids = whole.token_ids
        late = next(i for i in range(NUM_TOKENS * 3 // 4, NUM_TOKENS) if ids.index(ids[i]) == i)
        return {"stop_token_ids": [ids[late]]}
    return {}


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Undisturbed:
    """Each feature's request, and its answer on one worker, alone and streamed: the one that every other must equal."""
    server = fleet.server("--colocated=1")
    wanted = {}
    for number, (name, feature) in enumerate(FEATURES.items()):
        fields = {"prompt": [10 + number, *PROMPT], "max_tokens": NUM_TOKENS, "ignore_eos": True} | feature
        fields |= late_stop(name, server, fields)
        wanted[name] = (fields, stream(server, **fields))
    for name, (_, answer) in wanted.items():
        is_stopped = name in ("stop string", "stop token", "regex")
        assert answer.finish == ("stop" if is_stopped else "length") or name == "min_tokens", name
        assert NUM_TOKENS // 2 < len(answer.token_ids) <= NUM_TOKENS, name
    assert re.fullmatch(WORDS, wanted["regex"][1].text)
    assert re.fullmatch(r"\[[-0-9, \n\r\t]+", wanted["json schema"][1].text)
    return wanted


@contextmanager
def all_at_once(server: Server, undisturbed: Undisturbed) -> Iterator[list[str]]:
    """Runs every feature's request at the same time, none of it cached; compares their answers at the end. Gives their
    ids."""
    run = uuid.uuid4().hex[:12]
    ids = {name: f"{run}-{number}" for number, name in enumerate(undisturbed)}
    with ThreadPoolExecutor(len(undisturbed)) as pool:
        running = {
            name: pool.submit(
                stream, server, headers={"x-request-id": ids[name]}, cache_salt=run, **undisturbed[name][0]
            )
            for name in undisturbed
        }
        yield list(ids.values())
        for name, future in running.items():
            answer, wanted = future.result(), undisturbed[name][1]
            assert answer.finish != "error", (name, answer.error)
            assert answer.outcome == wanted.outcome, name


def attempts(server: Server, request_id: str) -> list[dict[str, Any]]:
    """Where a request was, and how each attempt but the last was lost."""
    response = server.get(f"/v1/requests/{request_id}/timeline")
    return list(response.json()["attempts"]) if response.status_code == 200 else []


def disturb(server: Server, worker_id: str, how: signal.Signals) -> None:
    """Sends that worker a signal."""
    os.kill(server.worker_pids()[worker_id], how)


def wait_for_tokens(server: Server, count: int) -> None:
    """Waits until the workers have sampled so many tokens from now on."""
    start = server.metric("twinpool_delivered_tokens_total")
    wait_for("tokens", lambda: server.metric("twinpool_delivered_tokens_total") >= start + count, 30)


def was_lost(server: Server, ids: list[str]) -> bool:
    """Whether any of these requests had to be started again."""
    return any(len(attempts(server, request_id)) > 1 for request_id in ids)


def test_a_preempted_sequence_starts_over_or_asks_for_a_transfer_that_comes_only_once(
    anywhere: Server, undisturbed: Undisturbed
) -> None:
    """L6, L7: ten sequences that grow to up to 46 blocks each in a pool of 128, if enough of them run together: on a
    busy machine their clients may come one after the other."""
    before = anywhere.metric("twinpool_preemptions_total")
    for _ in range(TRIES):
        with all_at_once(anywhere, undisturbed) as ids:
            pass
        if was_lost(anywhere, ids):
            break
    else:
        pytest.fail(f"nobody was preempted in {TRIES} tries")
    wait_for("preemptions", lambda: anywhere.metric("twinpool_preemptions_total") > before, 5)


def test_a_killed_decode_worker_ends_its_streams_or_doubles_a_token(
    split: Server, undisturbed: Undisturbed
) -> None:
    """P3, C5: SIGKILL of the only decode worker in mid-stream; on a busy machine it may come after the end of all.
    A new process of the same name takes its place."""
    for _ in range(TRIES):
        with all_at_once(split, undisturbed) as ids:
            wait_for_tokens(split, 80)
            disturb(split, "decode-0", signal.SIGKILL)
        if was_lost(split, ids):
            return
        wait_for("the next decode worker", lambda: split.get("/ready").status_code == 200, 30)
    pytest.fail(f"all had ended before decode was killed, {TRIES} times")


def test_a_killed_prefill_worker_leaves_its_transfers_waiting(
    split: Server, undisturbed: Undisturbed
) -> None:
    """P1: SIGKILL of a prefill worker while its blocks travel. Decode is told at once, and the other one goes on."""
    with all_at_once(split, undisturbed) as ids:

        def sender() -> str:
            """The prefill worker of a request whose blocks travel now."""
            for request_id in ids:
                story = split.get(f"/v1/requests/{request_id}/timeline").json()
                if story.get("state") == "transferring":
                    return str(story["attempts"][-1]["prefill_worker"])
            return ""

        def killed() -> bool:
            """Whether blocks travel as decode stands still, so that they do not arrive; then their sender is killed."""
            with frozen(split, "decode-0"):
                if worker_id := sender():
                    disturb(split, worker_id, signal.SIGKILL)
                return bool(worker_id)

        wait_for_tokens(split, 1)
        wait_for("blocks travel", killed, 30.0)
    assert was_lost(split, ids)


def test_wrong_bytes_are_decoded(broken: Server, undisturbed: Undisturbed) -> None:
    """W4: bytes are flipped in flight and pushes get lost. The digest finds it, and the request goes on by another
    attempt."""
    before = broken.metric("twinpool_kv_digest_mismatches_total")
    with all_at_once(broken, undisturbed) as ids:
        pass
    assert broken.metric("twinpool_kv_digest_mismatches_total") > before
    assert was_lost(broken, ids)


@pytest.mark.parametrize(("transport", "worker_id"), [("tcp", "decode-0"), ("shm", "prefill-0")])
def test_a_drained_worker_takes_its_streams_with_it(
    fleet: Fleet, transport: str, worker_id: str, undisturbed: Undisturbed
) -> None:
    """SIGTERM to one worker, as an operator sends it."""
    server = split_server(fleet, transport)
    left = server.metric("twinpool_workers_lost_total")
    with all_at_once(server, undisturbed):
        wait_for_tokens(server, 40)
        disturb(server, worker_id, signal.SIGTERM)
    assert server.metric("twinpool_workers_lost_total") == left + 1
