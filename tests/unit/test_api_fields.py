"""What single fields of a request change in its answer."""

from __future__ import annotations

from itertools import chain
from typing import Any

import httpx
import pytest
from support.gateway import ScriptedService, error_of, events, logprobs_of, outputs, says, tiny_tokenizer

from twinpool.coordinator.gateway.token_texts import TokenTexts
from twinpool.coordinator.gateway.whole_reply import INLINE_LOGPROBS
from twinpool.coordinator.service import Output
from twinpool.request import FinishReason

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
EOS = tiny_tokenizer().eos_token_ids
TEXTS = TokenTexts(tiny_tokenizer())


async def choice_of(client: httpx.AsyncClient, path: str, **fields: object) -> dict[str, Any]:
    """The only choice of a whole answer."""
    response = await client.post(path, json=fields | (HELLO if path == CHAT else {}))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    found: dict[str, Any] = choice
    return found


# ── log probabilities ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_chats_log_probabilities_have_the_likeliest_and_bytes(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("a€", FinishReason.LENGTH)
    ids = tiny_tokenizer().encode("a€")
    choice = await choice_of(client, CHAT, logprobs=True, top_logprobs=2)
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", *["\N{REPLACEMENT CHARACTER}"] * 3]
    assert bytes(chain.from_iterable(entry["bytes"] for entry in content)).decode() == "a€"
    first_place = len(service.submission.prompt_token_ids)
    for place, (entry, token_id) in enumerate(zip(content, ids, strict=True), start=first_place):
        expected = logprobs_of(token_id, place, 2)
        assert entry["logprob"] == expected.logprob
        assert [(top["token"], top["logprob"], bytes(top["bytes"])) for top in entry["top_logprobs"]] == [
            (TEXTS.text(id_), logprob, bytes(TEXTS.bytes(id_))) for id_, logprob in expected.top
        ]


async def test_without_top_logprobs_there_is_only_the_chosen_token(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the")
    choice = await choice_of(client, CHAT, logprobs=True)
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
    assert service.submission.sampling.logprobs == 0
    assert (await choice_of(client, CHAT))["logprobs"] is None


async def test_a_completions_log_probabilities_are_lists(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the fox")
    logprobs = (await choice_of(client, COMPLETIONS, prompt=[5], logprobs=2))["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == ["the", " fox", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 3, 7]
    for place, token_id in enumerate([*tiny_tokenizer().encode("the fox"), *EOS]):
        expected = logprobs_of(token_id, 1 + place, 2)
        likeliest = dict(expected.top) | {token_id: expected.logprob}
        assert logprobs["token_logprobs"][place] == expected.logprob
        assert logprobs["top_logprobs"][place] == {TEXTS.text(id_): value for id_, value in likeliest.items()}


async def test_of_tokens_that_look_the_same_the_likeliest_is_told(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    euro = tiny_tokenizer().encode("€")
    likeliest = logprobs_of(euro[0], 0, 1)

    def play(_: object) -> list[Output]:
        told = likeliest._replace(logprob=-9.0, top=((euro[1], -0.5),))
        return [Output((euro[0],), 0, FinishReason.LENGTH, logprobs=(told,))]

    service.script = play
    logprobs = (await choice_of(client, COMPLETIONS, prompt=[5], logprobs=1))["logprobs"]
    assert logprobs["token_logprobs"] == [-9.0]
    assert logprobs["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -0.5}]


async def test_tokens_can_be_named_by_their_ids(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script = says("€", FinishReason.LENGTH)
    ids = tiny_tokenizer().encode("€")
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = (await choice_of(client, COMPLETIONS, prompt=[5], **fields))["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{id_}" for id_ in ids]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)


async def test_log_probabilities_of_a_long_answer_are_written_like_those_of_a_short_one(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tiny_tokenizer().encode("the fox " * INLINE_LOGPROBS)[: 2 * INLINE_LOGPROBS]
    service.script = lambda _: outputs(ids, range(len(ids)), FinishReason.LENGTH)
    logprobs = (await choice_of(client, COMPLETIONS, prompt=[5], logprobs=0))["logprobs"]
    assert logprobs["token_logprobs"] == [logprobs_of(id_, 1 + i, 0).logprob for i, id_ in enumerate(ids)]


# ── the prompt in the answer ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_the_prompt_with_its_log_probabilities(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = says(" dog", FinishReason.LENGTH)
    body = {"prompt": "the quick", "echo": True, "logprobs": 1, "stream": stream}
    response = await client.post(COMPLETIONS, json=body)
    parts = events(response.text)[:-1] if stream else [response.json()]
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == "the quick dog"
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    prompt_ids, ids = tiny_tokenizer().encode("the quick"), tiny_tokenizer().encode(" dog")
    assert [item for part in told for item in part["tokens"]] == [
        TEXTS.text(id_) for id_ in (*prompt_ids, *ids)
    ]
    values = [logprobs_of(id_, place, 1).logprob for place, id_ in enumerate((*prompt_ids, *ids))]
    assert [item for part in told for item in part["token_logprobs"]] == [None, *values[1:]]
    tops = [item for part in told for item in part["top_logprobs"]]
    assert tops[0] is None
    assert all(max(top.values()) >= value for top, value in zip(tops[1:], values[1:], strict=True))
    text = "the quick dog"
    offsets = [item for part in told for item in part["text_offset"]]
    assert all(
        text[at:].startswith(TEXTS.text(id_)) for at, id_ in zip(offsets, (*prompt_ids, *ids), strict=True)
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the quick", [[80, 81], [82]]])
async def test_echo_and_no_tokens_is_the_prompt_alone(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool, prompt: Any
) -> None:
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await client.post(COMPLETIONS, json={"prompt": prompt, **fields, **options})
    parts = events(response.text)[:-1] if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    prompts = [tiny_tokenizer().encode(prompt)] if isinstance(prompt, str) else prompt
    for index, ids in enumerate(prompts):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == tiny_tokenizer().decode(ids)
        assert [len(choice["logprobs"]["tokens"]) for choice in own if choice["logprobs"]] == [len(ids)]
        assert own[-1]["finish_reason"] == "length"
    assert parts[-1]["usage"]["completion_tokens"] == 0
    assert {s.sampling.max_tokens for s in service.submissions} == {1}


async def test_the_prompts_log_probabilities_come_by_token_id(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "the quick"}), (CHAT, HELLO)):
        answer = (await client.post(path, json={**body, "prompt_logprobs": 2})).json()
        told = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
        prompt_ids = service.submissions[-1].prompt_token_ids
        assert told[0] is None
        for place, (token_id, likeliest) in enumerate(zip(prompt_ids[1:], told[1:], strict=True), start=1):
            expected = logprobs_of(token_id, place, 2)
            own = likeliest[str(token_id)]
            assert (own["logprob"], own["decoded_token"]) == (expected.logprob, TEXTS.text(token_id))
            assert own["rank"] == (1 if place % 2 == 0 else None)
            assert [likeliest[str(id_)]["logprob"] for id_, _ in expected.top] == [v for _, v in expected.top]


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_stopped_an_answer_is_told(
    client: httpx.AsyncClient, service: ScriptedService, path: str
) -> None:
    prompt = {} if path == CHAT else {"prompt": "a"}
    body = HELLO if path == CHAT else prompt
    service.script = says("the fox xyz and")
    choice = await choice_of(client, path, **prompt, stop=["xyz", "and"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "xyz")
    ids = tiny_tokenizer().encode("the fox")
    service.script = lambda _: outputs(ids, (), FinishReason.STOP)
    choice = await choice_of(client, path, **prompt, stop_token_ids=[ids[-1]])
    assert choice["stop_reason"] == ids[-1]
    streamed = await client.post(path, json={**body, "stop_token_ids": [ids[-1]], "stream": True})
    assert events(streamed.text)[-2]["choices"][0]["stop_reason"] == ids[-1]
    assert "stop_reason" not in await choice_of(client, path, **prompt)


async def test_the_stop_string_can_be_part_of_the_text(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the fox xyz and")
    choice = await choice_of(client, COMPLETIONS, prompt="a", stop="xyz", include_stop_str_in_output=True)
    assert choice["text"] == "the fox xyz"


async def test_special_tokens_can_be_part_of_the_text(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = [*tiny_tokenizer().encode("the"), *EOS, *tiny_tokenizer().encode(" fox")]
    service.script = lambda _: outputs(ids, (), FinishReason.LENGTH)
    assert (await choice_of(client, COMPLETIONS, prompt="a"))["text"] == "the fox"
    choice = await choice_of(client, COMPLETIONS, prompt="a", skip_special_tokens=False)
    assert choice["text"] == "the<|im_end|> fox"


# ── the prompt ────────────────────────────────────────────────────────────────────────────────────────────


async def test_of_a_long_prompt_the_last_tokens_are_kept(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = [5 + i % 200 for i in range(1000)]
    await choice_of(client, COMPLETIONS, prompt=ids, truncate_prompt_tokens=3)
    assert service.submissions[-1].prompt_token_ids == tuple(ids[-3:])
    await choice_of(client, COMPLETIONS, prompt=ids, truncate_prompt_tokens=-1, max_tokens=6)
    assert service.submissions[-1].prompt_token_ids == tuple(ids[-250:])
    choice = await choice_of(client, COMPLETIONS, prompt="the quick", truncate_prompt_tokens=1, echo=True)
    assert choice["text"].startswith(" quick")


async def test_an_answer_can_go_on_with_the_last_message(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "The"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await client.post(CHAT, json=body)).status_code == 200
    prompt = tiny_tokenizer().decode(service.submission.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nThe")


# ── usage and warnings ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["field", "header"])
async def test_what_became_of_a_request_is_told_when_it_is_asked(
    client: httpx.AsyncClient, service: ScriptedService, path: str, stream: bool, way: str
) -> None:
    service.num_cached = 2
    body = {**(HELLO if path == CHAT else {"prompt": [5, 6, 7]}), "n": 2, "stream": stream}
    headers = {"x-twinpool-usage": "1"} if way == "header" else {}
    response = await client.post(
        path, json=body | ({"twinpool": True} if way == "field" else {}), headers=headers
    )
    usage = (events(response.text)[-2] if stream else response.json())["usage"]
    num_prompt = usage["prompt_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["twinpool"] == {
        "queue_ms": 100.0, "prefill_ms": 200.0, "transfer_ms": 50.0, "decode_ms": 400.0,
        "computed_tokens": num_prompt - 2, "cached_tokens": 2, "transferred_tokens": 0, "resumed": 0,
    }  # fmt: skip


async def test_what_is_forgotten_already_is_not_made_up(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.forgets_facts = True
    usage = (await client.post(COMPLETIONS, json={"prompt": [5], "twinpool": True})).json()["usage"]
    assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}


async def test_usage_so_far_needs_include_usage(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    *chunks, _ = events((await client.post(COMPLETIONS, json=body)).text)
    assert all("usage" not in chunk for chunk in chunks)


async def test_fields_that_nobody_has_heard_of_are_named_in_a_header(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        body = {**HELLO, "made_up": 1, "né\nw": 2, "stream": stream}
        response = await client.post(CHAT, json=body)
        assert response.headers["x-twinpool-warning"] == "ignored fields: made_up, n??w"
    assert "x-twinpool-warning" not in (await client.post(CHAT, json=HELLO)).headers
    many = {f"field_{number}": 1 for number in range(500)}
    assert len((await client.post(CHAT, json=HELLO | many)).headers["x-twinpool-warning"]) <= 512


async def test_log_probabilities_that_are_too_many_for_one_body_end_the_answer(
    client: httpx.AsyncClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.coordinator.gateway.whole_reply.MAX_LOGPROBS", 20)
    ids = tiny_tokenizer().encode("the fox jumps over")
    service.script = lambda _: outputs(ids * 3, range(50), FinishReason.LENGTH)
    body = {"prompt": "a", "logprobs": 3, "n": 2}
    error = error_of(await client.post(COMPLETIONS, json=body), 400)
    assert "more than 20 log probabilities" in error["message"]
    assert (await client.post(COMPLETIONS, json=body | {"stream": True})).status_code == 200
