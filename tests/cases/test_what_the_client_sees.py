"""What the client sees: a status and a finish reason that are true, each token once, whatever ends the answer.

Ids as in `README.md`."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.fleet import Fleet, frozen, frozen_in_transfer, is_colocated
from support.gateway import tiny_tokenizer
from support.server import Server
from support.visitors import Visit, ask, stream

LONG_PROMPT = {"prompt": list(range(10, 300)) * 2, "max_tokens": 400, "ignore_eos": True}
LONG_ANSWER = {"prompt": "A long story", "max_tokens": 900, "ignore_eos": True}
TRIES = 20
(EOS,) = tiny_tokenizer().eos_token_ids


def test_an_aborted_answer_ends_like_a_whole_one(anywhere: Server, visit: Visit) -> None:
    """C1, C2, W3: cancelled while it prefills, while its blocks travel, and while it decodes: the stream says so in an
    error event, no token follows, and the next request does not hang."""
    states = (
        ("prefilling", "decoding") if is_colocated(anywhere) else ("prefilling", "transferring", "decoding")
    )
    for state in states:
        seen = ""
        for _ in range(TRIES):
            visitor = visit(anywhere, cache_salt=uuid.uuid4().hex, **LONG_PROMPT)
            visitor.wait_until(state)
            assert anywhere.post(f"/v1/requests/{visitor.request_id}/cancel", {}).status_code == 200
            answer = visitor.read_all()
            if answer.finish == "length":
                continue  # it was over before the server was told
            assert answer.finish == "error"
            assert "cancelled" in answer.error
            visitor.wait_until("cancelled")
            story = visitor.timeline()
            assert story["finish_reason"] == "cancelled"
            assert story["num_output_tokens"] >= len(answer.token_ids)
            seen = visitor.states()[-3]
            if seen == state:
                break
        assert seen == state, "the state is too short"
        assert stream(anywhere, prompt="And now?", max_tokens=4, ignore_eos=True).finish == "length"


def test_a_timeout_fires_in_one_pool_only(split: Server, visit: Visit) -> None:
    """C4: the time runs out while prefill stands still, while decode does, and while both work."""
    short = {"timeout": 1.0, "max_tokens": 600, "ignore_eos": True}
    with frozen_in_transfer(split, visit, prompt=list(range(20, 300)), **short) as late:
        assert late.read_all().finish == "error"
        assert late.timeline()["finish_reason"] == "timeout"
    for _ in range(TRIES):
        visitor = visit(split, prompt="A long story", **short | {"timeout": 1.5, "max_tokens": 900})
        visitor.wait_until("decoding")
        with frozen(split, "decode-0"):
            finish = visitor.read_all().finish
            reason = visitor.timeline()["finish_reason"]
        if finish != "length":  # else it was over before decode stood still
            break
    assert (finish, reason) == ("error", "timeout")
    for _ in range(TRIES):
        answer = ask(split, prompt="A long story", **short | {"timeout": 0.1, "max_tokens": 900})
        if answer.finish != "length":  # else a busy machine let decode end before anybody looked at the time
            break
    assert (answer.status, answer.finish) == (504, "error")


def test_one_token_that_was_asked_for_becomes_two(split: Server) -> None:
    """C6: `max_tokens` 1 gives one token, and decode is never involved."""
    heard = [
        split.metric(f"twinpool_{name}_total", role="decode") for name in ("cancelled", "kv_blocks_received")
    ]
    for number in range(5):
        answer = stream(split, prompt=f"Number {number}", max_tokens=1, ignore_eos=True)
        assert (len(answer.token_ids), answer.finish) == (1, "length")
        assert answer.usages[0]["completion_tokens"] == 1
    assert heard == [
        split.metric(f"twinpool_{name}_total", role="decode") for name in ("cancelled", "kv_blocks_received")
    ]


@pytest.fixture(scope="module")
def ends_of_text(fleet: Fleet) -> list[dict[str, Any]]:
    """Two requests: the model ends the answer with its first token, and with its second.

    The noise at a place depends on seed and place alone: what was sampled there once is sampled there again, wherever
    the prompt ends.
    """
    fields = {"temperature": 1.5, "seed": 5, "ignore_eos": True}
    prompt = list(range(30, 60))
    ids = ask(fleet.server("--colocated=1"), prompt=prompt, max_tokens=900, **fields).token_ids
    end = ids.index(EOS, 2)
    return [{"prompt": prompt + ids[: end - n], "temperature": 1.5, "seed": 5} for n in (0, 1)]


def test_decode_goes_on_after_an_end_in_the_first_token(
    anywhere: Server, ends_of_text: list[dict[str, Any]]
) -> None:
    """C7: the first token, or the second, ends the answer: as end of text, as a stop token, as a stop string. With
    `ignore_eos` it goes on, and still ends."""
    for number, fields in enumerate(ends_of_text, start=1):
        for way in (ask, stream):
            answer = way(anywhere, max_tokens=12, **fields)
            assert (answer.finish, len(answer.token_ids)) == ("stop", number)
            assert answer.token_ids[-1] == EOS
            longer = way(anywhere, max_tokens=12, ignore_eos=True, **fields)
            assert (longer.finish, len(longer.token_ids)) == ("length", 12)
    greedy = ask(anywhere, prompt="To the point", max_tokens=12, ignore_eos=True)
    for number in (1, 2):
        stop = greedy.token_ids[number - 1]
        if greedy.token_ids.index(stop) == number - 1:
            answer = stream(anywhere, prompt="To the point", max_tokens=12, stop_token_ids=[stop])
            assert (answer.finish, answer.token_ids) == ("stop", greedy.token_ids[:number])
    text = ask(anywhere, prompt="To the point", max_tokens=1, ignore_eos=True).text
    stopped = stream(anywhere, prompt="To the point", max_tokens=12, stop=[text])
    assert (stopped.finish, stopped.text, stopped.usages[0]["completion_tokens"]) == ("stop", "", 1)


def test_more_of_the_prompt_is_reported_as_cached_than_there_is(anywhere: Server) -> None:
    """C8: nothing of it the first time; all but what must be computed the second time; and the two add up."""
    salt, prompt = uuid.uuid4().hex, list(range(40, 117))
    counts = []
    for _ in range(2):
        request_id = uuid.uuid4().hex
        ask(anywhere, headers={"x-request-id": request_id}, prompt=prompt, max_tokens=2, cache_salt=salt)
        prefill = anywhere.get(f"/v1/requests/{request_id}/timeline").json()["prefill"]
        counts.append((prefill["num_cached_tokens"], prefill["num_computed_tokens"]))
    assert counts[0] == (0, len(prompt))
    assert counts[1] in [(72, 5), counts[0]]  # the other prefill worker has not seen it


def test_log_probabilities_leave_out_the_first_token(anywhere: Server) -> None:
    """C9: every token has one, the first too, which another pool makes: the one that it has as part of a prompt."""
    prompt, num_output = list(range(40, 77)), 6
    body = {"prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    (choice,) = anywhere.post("/v1/completions", {**body, "return_token_ids": True}).json()["choices"]
    told = choice["logprobs"]["token_logprobs"]
    assert len(told) == num_output
    for chosen, likeliest in zip(told, choice["logprobs"]["top_logprobs"], strict=True):
        assert chosen == max(likeliest.values())
    scored = {"prompt": prompt + choice["token_ids"], "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = anywhere.post("/v1/completions", scored).json()["choices"]
    assert choice["logprobs"]["token_logprobs"][len(prompt) :] == pytest.approx(told, abs=1e-3)


def test_penalties_leave_out_the_first_token(anywhere: Server, colocated: Server) -> None:
    """C10: the first token obeys them, and counts for those after it."""
    prompt = list(range(2, 300))
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
    assert ask(anywhere, **body, max_tokens=1).token_ids[0] in prompt
    assert ask(anywhere, **body, max_tokens=1, repetition_penalty=1e6).token_ids[0] not in prompt
    for field in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.3}):
        alone = ask(colocated, **body, max_tokens=16, **field)
        assert ask(anywhere, **body, max_tokens=16, **field).outcome == alone.outcome


def test_two_requests_of_one_id_mix(anywhere: Server) -> None:
    """C11: the same X-Request-Id twice at once. The second is refused while the first one runs; if it is wanted all the
    same, each gets its own answer."""
    bodies = [{"prompt": [100 + n] * 30, "max_tokens": 120, "ignore_eos": True} for n in range(2)]
    alone = [ask(anywhere, **body) for body in bodies]

    def both(**headers: str) -> list[int]:
        """Asks for both under one id; their statuses, the lower one first."""
        headers["x-request-id"] = uuid.uuid4().hex
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(stream, anywhere, headers=headers, **body) for body in bodies]
            answers = [future.result() for future in running]
        for answer, right in zip(answers, alone, strict=True):
            assert answer.status == 409 or answer.outcome == right.outcome
        return sorted(answer.status for answer in answers)

    # One that is over before the other has come meets no other.
    assert any(both() == [200, 409] for _ in range(TRIES)), "nobody was refused"
    assert both(**{"x-allow-duplicate": "true"}) == [200, 200]
