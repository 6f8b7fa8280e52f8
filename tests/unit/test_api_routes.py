"""The gateway's routes, spoken to without a socket."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, error_of, events, says, tiny_tokenizer

import twinpool
from twinpool.coordinator.gateway.bad_words import token_sequences
from twinpool.coordinator.gateway.prompts import INLINE_CHARS
from twinpool.coordinator.service import Output
from twinpool.engine.tokenizer import Tokenizer
from twinpool.request import FinishReason

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_chat_answer_has_text_reason_and_usage(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("Paris is it")
    response = await client.post(CHAT, json={**HELLO, "model": MODEL})
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris is it", "refusal": None}
    assert choice["finish_reason"] == "stop"
    num_prompt = len(service.submission.prompt_token_ids)
    num_output = len(tiny_tokenizer().encode("Paris is it")) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert service.delivered_ids == [service.submission.request_id]


async def test_a_chat_prompt_is_the_rendered_template(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post(CHAT, json={**HELLO, "chat_template_kwargs": {"suffix": "<think>"}})
    prompt = tiny_tokenizer().decode(service.submission.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>"


async def test_a_completion_answer_stops_at_its_length(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says(" brown fox", FinishReason.LENGTH)
    answer = (await client.post(COMPLETIONS, json={"prompt": "the quick"})).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": " brown fox", "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_token_ids_are_taken_as_they_are(
    client: httpx.AsyncClient, service: ScriptedService, prompt: list[object]
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": prompt})
    assert response.status_code == 200
    assert service.submission.prompt_token_ids == (5, 6, 7)


async def test_a_chat_stream_is_role_content_reason_usage_done(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the fox")
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(CHAT, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    role, *contents, reason, usage, done = events(response.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in contents)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in contents) == "the fox"
    assert reason["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tiny_tokenizer().encode("the fox")) + 1
    assert done == "[DONE]"
    chunks = [role, *contents, reason]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {(chunk["id"], chunk["object"], chunk["created"]) for chunk in [*chunks, usage]} == {
        (role["id"], "chat.completion.chunk", role["created"])
    }
    assert service.delivered_ids == [service.submission.request_id]


async def test_a_completion_stream_has_no_usage_unless_asked_for(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("lazy dog", FinishReason.LENGTH)
    response = await client.post(COMPLETIONS, json={"prompt": "the", "stream": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "lazy dog"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert all("usage" not in chunk for chunk in chunks)


async def test_one_output_is_one_chunk(client: httpx.AsyncClient, service: ScriptedService) -> None:
    ids = tuple(tiny_tokenizer().encode("jumps over the lazy dog"))
    service.script = lambda _: [Output(ids[:3], 0), Output(ids[3:], 3, FinishReason.LENGTH)]
    response = await client.post(COMPLETIONS, json={"prompt": "the", "stream": True})
    texts = [chunk["choices"][0]["text"] for chunk in events(response.text)[:-1]]
    decode = tiny_tokenizer().decode
    assert texts == [decode(ids[:3]), decode(ids[3:]), ""]


async def test_token_ids_come_back_when_asked_for(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("fox")
    expected = [*tiny_tokenizer().encode("fox"), *tiny_tokenizer().eos_token_ids]
    body = {"prompt": [5, 6], "return_token_ids": True}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == [5, 6]
    streamed = events((await client.post(COMPLETIONS, json={**body, "stream": True})).text)
    choices = [chunk["choices"][0] for chunk in streamed[:-1]]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert [id_ for choice in choices for id_ in choice.get("token_ids", [])] == expected
    chat = (await client.post(CHAT, json={**HELLO, "return_token_ids": True})).json()
    assert chat["prompt_token_ids"] == list(service.submissions[-1].prompt_token_ids)
    assert chat["choices"][0]["token_ids"] == expected


async def test_a_stop_string_ends_the_work_at_the_token_that_completes_it(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tiny_tokenizer().encode("the fox xyz and more")
    service.script = lambda _: [Output((id_,), i) for i, id_ in enumerate(ids)]
    answer = (await client.post(COMPLETIONS, json={"prompt": "a", "stop": "xy"})).json()
    assert answer["choices"][0]["text"] == "the fox "
    assert answer["choices"][0]["finish_reason"] == "stop"
    num_tokens = answer["usage"]["completion_tokens"]
    assert tiny_tokenizer().decode(ids[:num_tokens]).endswith("xy")
    assert service.completed == [(service.submission.request_id, num_tokens)]


async def test_the_coordinator_hears_of_a_stop_string_whose_reader_was_behind(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tuple(tiny_tokenizer().encode("the fox xyz and more"))
    service.script = lambda _: [Output(ids, 0, FinishReason.LENGTH)]
    answer = (await client.post(COMPLETIONS, json={"prompt": "a", "stop": "xy"})).json()
    num_tokens = answer["usage"]["completion_tokens"]
    assert num_tokens < len(ids)
    assert service.completed == [(service.submission.request_id, num_tokens)]


async def test_long_prompts_are_tokenized_in_a_thread_like_short_ones_here(
    client: httpx.AsyncClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.max_model_len = 100_000
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode

    def recorded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    for text in ("the quick brown fox", "the quick brown fox " * (INLINE_CHARS // 15)):
        assert (await client.post(COMPLETIONS, json={"prompt": text})).status_code == 200
        ids = service.submissions[-1].prompt_token_ids
        assert list(ids) == encode(tiny_tokenizer(), text)
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "the " * 4000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "the " * 4000}]}, "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    error = error_of(await client.post(path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_more_messages_than_the_context_has_tokens_are_refused_before_they_are_rendered(
    client: httpx.AsyncClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "apply_chat_template", None)
    messages = [{"role": "user", "content": ""}] * (service.max_model_len + 1)
    error = error_of(await client.post(CHAT, json={"messages": messages}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(len(messages)) in error["message"]


async def test_a_wrong_model_name_is_not_sent_back_at_full_length(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CHAT, json={**HELLO, "model": "x" * 10_000}), 404)
    assert len(error["message"]) < 300


async def test_times_of_a_submission_are_in_order(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    before = service.now()
    await client.post(CHAT, json=HELLO)
    got = service.submission
    assert before <= got.received_at <= got.validated_at <= got.tokenized_at <= service.now()


# ── sampling parameters ───────────────────────────────────────────────────────────────────────────────────


async def test_defaults_are_the_rest_of_the_context_for_chat_and_16_for_completions(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post(CHAT, json={**HELLO, "max_tokens": None})
    chat = service.submissions[0]
    assert chat.sampling.max_tokens == service.max_model_len - len(chat.prompt_token_ids)
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k, chat.sampling.min_p) == (
        1.0,
        1.0,
        0,
        0.0,
    )
    await client.post(COMPLETIONS, json={"prompt": "a"})
    assert service.submissions[1].sampling.max_tokens == 16
    await client.post(COMPLETIONS, json={"prompt": [1] * (service.max_model_len - 3)})
    assert service.submissions[2].sampling.max_tokens == 3


async def test_sampling_fields_reach_the_workers(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {
        **HELLO, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
        "seed": 11, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [4, 9], "cache_salt": "tenant",
        "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.25, "logprobs": True,
        "top_logprobs": 3, "logit_bias": {"5": -100, "7": 1.5},
        "allowed_token_ids": [3, 5], "bad_words": ["fox"],
    }  # fmt: skip
    await client.post(CHAT, json=body)
    sampling = service.submission.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 40)
    assert (sampling.min_p, sampling.seed, sampling.ignore_eos, sampling.min_tokens) == (0.1, 11, True, 2)
    assert sampling.stop_token_ids == (4, 9)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.2, -0.5, 0.25)
    assert sampling.logit_bias == ((5, -100), (7, 1.5))
    assert sampling.allowed_token_ids == (3, 5)
    assert sampling.bad_words == token_sequences(tiny_tokenizer(), ["fox"])
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, None)
    assert service.submission.cache_salt not in ("", "tenant")


async def test_a_missing_seed_is_drawn_anew(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for _ in range(3):
        await client.post(CHAT, json=HELLO)
    seeds = {submission.sampling.seed for submission in service.submissions}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_negative_seeds_are_seeds_too(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for seed in (-1, -1, -2):
        await client.post(CHAT, json={**HELLO, "seed": seed})
    first, again, other = (submission.sampling.seed for submission in service.submissions)
    assert first == again != other
    assert 0 <= first < 2**63


# ── request ids ───────────────────────────────────────────────────────────────────────────────────────────


async def test_the_clients_id_is_the_requests_id(client: httpx.AsyncClient, service: ScriptedService) -> None:
    response = await client.post(CHAT, json=HELLO, headers={"x-request-id": "trace-7:a"})
    assert response.headers["x-request-id"] == "trace-7:a"
    assert response.json()["id"] == "chatcmpl-trace-7:a"
    assert service.submission.request_id == "trace-7:a"
    for asked in ("trace-7:a", "chatcmpl-trace-7:a"):
        assert (await client.get(f"/v1/requests/{asked}/timeline")).json()["request_id"] == "trace-7:a"


@pytest.mark.parametrize("wanted", ["a b", "", "x" * 129, "../etc", "a/b", 'q"', "-x"])
async def test_an_id_that_is_not_sane_is_replaced(
    client: httpx.AsyncClient, service: ScriptedService, wanted: str
) -> None:
    response = await client.post(CHAT, json=HELLO, headers={"x-request-id": wanted})
    assert response.status_code == 200
    assert service.submission.request_id == response.headers["x-request-id"] != wanted


async def test_a_repeated_id_never_names_two_requests(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    for _ in range(3):
        await client.post(CHAT, json=HELLO, headers={"x-request-id": "same"})
    first, *later = (submission.request_id for submission in service.submissions)
    assert first == "same"
    assert len({first, *later}) == 3
    assert all(request_id.startswith("same-") for request_id in later)


# ── the other routes ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_model_is_listed(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert (await client.get(f"/v1/models/{MODEL}")).json() == card
    assert error_of(await client.get("/v1/models/other/model"), 404)["code"] == "model_not_found"


async def test_before_a_worker_has_joined_models_are_listed_and_requests_refused(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.max_model_len = None
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": [1]})):
        assert error_of(await client.post(path, json=body), 503)["code"] == "no_worker"


async def test_ready_says_what_is_missing(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.get("/ready")).status_code == 200
    service.ready_answer = (False, "no decode worker has registered")
    response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"ready": False, "reason": "no decode worker has registered"}
    assert (await client.get("/health")).status_code == 200


async def test_health_says_what_stands_still(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.get("/health")).json()["status"] == "ok"
    service.health_answer = (False, "3 requests stand still: no decode worker")
    response = await client.get("/health")
    assert response.status_code == 503
    assert "no decode worker" in response.json()["reason"]


async def test_an_unknown_timeline_is_404(client: httpx.AsyncClient) -> None:
    for name in ("never", "chatcmpl-never"):
        response = await client.get(f"/v1/requests/{name}/timeline")
        assert error_of(response, 404)["code"] == "request_not_found"


async def test_metrics_and_version_are_served(client: httpx.AsyncClient) -> None:
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "twinpool_requests_total 0" in metrics.text
    assert (await client.get("/version")).json() == {"version": twinpool.__version__}


def test_the_gateway_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers'} & sys.modules.keys()"
    code = f"import sys, twinpool.coordinator.gateway.routes; sys.exit(bool({heavy}))"
    source = str(Path(twinpool.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})
