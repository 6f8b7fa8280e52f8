"""Numbers: what is measured is what the client saw, and what is counted adds up. Ids as in `README.md`."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
from support.fleet import is_colocated
from support.server import Server, wait_for
from support.visitors import ask, request_body, stream

STAGES = ("validate", "tokenize", "queue", "prefill", "deliver")
CLOCK_LIMIT_S = 1.0
"""What the two sides of a connection on a busy machine may differ by."""
SETTLED_S = 1.2
"""Each worker's heartbeat, one every 0.5 s, has come twice by then."""
PROMPTS = [list(range(20 + n, 120 + 2 * n)) for n in range(8)]


def test_ttft_stops_before_the_client_has_anything(anywhere: Server) -> None:
    """N1: the server's time to the first token is the client's, and its stages sum to it to the microsecond."""
    request_id = uuid.uuid4().hex
    body = request_body(stream=True, prompt=PROMPTS[0], max_tokens=40, ignore_eos=True, cache_salt=request_id)
    with httpx.Client(verify=False) as client:
        client.get(anywhere.url + "/version")  # so that the time of connecting is not in it
        sent_at = time.monotonic()
        headers = {"x-request-id": request_id}
        with client.stream("POST", anywhere.url + "/v1/completions", json=body, headers=headers) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            client_ttft_s = time.monotonic() - sent_at
            for _ in lines:
                pass
    story = anywhere.get(f"/v1/requests/{request_id}/timeline").json()
    assert sum(round(story["stages_s"][stage] * 1e6) for stage in STAGES) == round(story["ttft_s"] * 1e6)
    assert story["ttft_s"] <= client_ttft_s <= story["ttft_s"] + CLOCK_LIMIT_S
    assert all(seconds >= 0 for seconds in story["stages_s"].values())
    assert story["ttft_s"] <= story["e2e_s"]


COUNTED = (
    "requests", "admitted_prompt_tokens", "delivered_tokens", "prompt_tokens_computed", "prompt_tokens_cached",
    "output_tokens", "kv_blocks_sent", "kv_blocks_received", "kv_bytes_sent", "kv_bytes_received",
    "step_seconds", "steps",
)  # fmt: skip


def counts(server: Server) -> dict[str, float]:
    """All counters that the laws speak of, and those of the timings."""
    found = {name: server.metric(f"twinpool_{name}_total") for name in COUNTED if _has(server, name)}
    return found | {
        f"{t}_count": server.metric(f"twinpool_{t}_seconds_count") for t in ("ttft", "e2e", "queue")
    }


def _has(server: Server, name: str) -> bool:
    return f"\ntwinpool_{name}_total" in server.get("/metrics").text


def settled_counts(server: Server) -> dict[str, float]:
    """The counts once heartbeats bring nothing more: of all that was asked so far, and of nothing else."""
    seen, since = counts(server), time.monotonic()

    def is_settled() -> bool:
        nonlocal seen, since
        if (now := counts(server)) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > SETTLED_S

    wait_for("all is reported", is_settled)
    return seen


def grown(server: Server, before: dict[str, float]) -> dict[str, float]:
    """By how much each counter grew, none of which may ever fall."""
    by = {name: value - before.get(name, 0) for name, value in settled_counts(server).items()}
    assert all(growth >= 0 for growth in by.values()), by
    return by


def test_counters_do_not_add_up(anywhere: Server) -> None:
    """N2, N3: after a known number of requests, whole and streamed, cold and warm, the counters obey their laws, in
    total and for each pool by its name."""
    is_split = not is_colocated(anywhere)
    before = settled_counts(anywhere)
    salt = uuid.uuid4().hex
    answers = [
        way(anywhere, prompt=prompt, max_tokens=20, ignore_eos=True, cache_salt=salt)
        for way in (ask, stream)
        for prompt in PROMPTS
    ]
    num_output = sum(answer.usages[0]["completion_tokens"] for answer in answers)
    num_prompt = sum(answer.usages[0]["prompt_tokens"] for answer in answers)
    assert num_output == 20 * len(answers) == sum(len(answer.token_ids) for answer in answers)
    assert num_prompt == 2 * sum(map(len, PROMPTS))
    by = grown(anywhere, before)
    assert by["output_tokens"] == num_output
    assert by["requests"] == by["ttft_count"] == by["e2e_count"] == by["queue_count"] == len(answers)
    assert (
        by["admitted_prompt_tokens"]
        == num_prompt
        == by["prompt_tokens_computed"] + by["prompt_tokens_cached"]
    )
    assert by["delivered_tokens"] == num_output
    assert by["kv_blocks_sent"] == by["kv_blocks_received"]
    assert by["kv_bytes_sent"] == by["kv_bytes_received"]
    assert (by["kv_bytes_sent"] > 0) == is_split
    if is_split:
        computed = {
            r: anywhere.metric("twinpool_prompt_tokens_computed_total", role=r) for r in ("prefill", "decode")
        }
        assert computed["prefill"] > 0 == computed["decode"]
        sent = {r: anywhere.metric("twinpool_kv_bytes_sent_total", role=r) for r in ("prefill", "decode")}
        assert sent["prefill"] > 0 == sent["decode"]
        received = {
            r: anywhere.metric("twinpool_kv_bytes_received_total", role=r) for r in ("prefill", "decode")
        }
        assert received["decode"] > 0 == received["prefill"]


def test_what_is_tried_again_is_counted_twice(broken: Server) -> None:
    """N2: attempts that are lost over a broken link count as attempts. Requests, prompts, delivered tokens and times
    count once."""
    before = settled_counts(broken)
    lost = broken.metric("twinpool_attempts_lost_total") if _has(broken, "attempts_lost") else 0
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda prompt: stream(broken, prompt=prompt, max_tokens=20, ignore_eos=True), PROMPTS)
        )
    num_output = sum(answer.usages[0]["completion_tokens"] for answer in answers)
    by = grown(broken, before)
    assert by["requests"] == by["ttft_count"] == by["e2e_count"] == by["queue_count"] == len(PROMPTS)
    assert by["admitted_prompt_tokens"] == sum(map(len, PROMPTS))
    assert by["delivered_tokens"] == num_output == 20 * len(PROMPTS)
    assert broken.metric("twinpool_attempts_lost_total") > lost
    assert by["kv_blocks_received"] <= by["kv_blocks_sent"]
