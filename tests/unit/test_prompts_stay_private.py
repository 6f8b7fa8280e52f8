"""What a client says to the model stands in no log line and no error, whatever goes wrong with it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import httpx
import pytest
from support.gateway import ScriptedService
from support.http_gateway import running
from support.join_token import TEST_TOKEN

from twinpool.config import EngineConfig, LinkConfig, Role, SchedulerConfig, TransferConfig, WorkerConfig
from twinpool.coordinator.service import Output
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvariantViolation, NoWorker, QueueFull, RequestFailed
from twinpool.private_log import PrivateFormatter
from twinpool.worker.main import run_worker
from twinpool.worker.process import EXIT_FAILED

SECRET = "swordfish"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def message(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET, **fields}]}


WRONG = [
    (COMPLETIONS, {"prompt": {"text": SECRET}}),
    (COMPLETIONS, {"prompt": [SECRET, 5]}),
    (COMPLETIONS, {"prompt": [SECRET, SECRET]}),
    (COMPLETIONS, {"prompt": [[SECRET]]}),
    (COMPLETIONS, {"prompt": SECRET, "temperature": -1}),
    (COMPLETIONS, {"prompt": SECRET, "suffix": SECRET}),
    (COMPLETIONS, {"prompt": SECRET, "echo": True, "max_tokens": -1}),
    (COMPLETIONS, {"prompt": SECRET * 5000}),
    (COMPLETIONS, {"prompt": SECRET, "max_tokens": 9999}),
    (COMPLETIONS, {"prompt": SECRET, "model": "other"}),
    (COMPLETIONS, {"messages": SECRET}),
    (COMPLETIONS, SECRET),
    (COMPLETIONS, [SECRET]),
    (CHAT, {"messages": SECRET}),
    (CHAT, {"messages": [SECRET]}),
    (CHAT, {"messages": [{"content": SECRET}]}),
    (CHAT, message(role="boss")),
    (CHAT, message(content={"text": SECRET})),
    (CHAT, message(content=[SECRET])),
    (CHAT, message(content=[{"type": "text", "text": [SECRET]}])),
    (CHAT, message(content=[{"type": "image_url", "image_url": SECRET}])),
    (CHAT, message(tool_calls=[SECRET])),
    (CHAT, message() | {"tools": [{"description": SECRET}]}),
    (CHAT, message() | {"tools": [{"type": "function", "function": {"name": f"{SECRET}!"}}]}),
    (CHAT, message() | {"tools": [{"type": "function", "function": {"name": SECRET}}]}),
    (CHAT, message() | {"tools": [{"type": "function", "function": {"name": "f", "parameters": SECRET}}]}),
    (CHAT, message() | {"prediction": {"content": SECRET}}),
    (CHAT, message() | {"documents": [SECRET]}),
    (CHAT, message() | {"chat_template": SECRET}),
    (CHAT, message() | {"chat_template_kwargs": {"suffix": 5}}),
]


def assert_private(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], *told: str) -> None:
    written = capfd.readouterr()
    for text in (caplog.text, written.out, written.err, *told):
        assert SECRET not in text


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_a_refusal_does_not_repeat_a_prompt(
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    path: str,
    body: object,
) -> None:
    caplog.set_level(logging.DEBUG)
    for content in (json.dumps(body), json.dumps(body)[:-1], json.dumps(body).replace('"', "'")):
        response = await client.post(path, content=content)
        assert_private(caplog, capfd, response.text, str(response.headers))
        assert response.status_code != 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        None,
        QueueFull("full", retry_after_s=1),
        NoWorker("none"),
        RequestFailed("lost"),
        InvariantViolation("bug"),
    ],
)
async def test_no_end_of_a_request_logs_its_prompt(
    client: httpx.AsyncClient,
    service: ScriptedService,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    failure: Exception | None,
    stream: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    service.refusal = failure
    await client.post(CHAT, json=message() | {"stream": stream}, headers={"x-request-id": "r"})
    service.refusal = None
    service.script = lambda _: [Output((5,), 0), Output((5,), 0)]
    await client.post(CHAT, json=message() | {"stream": stream})
    assert_private(caplog, capfd)


def test_a_bug_is_logged_without_the_text_that_it_stumbled_over() -> None:
    def tokenize(text: str) -> None:
        try:
            raise ValueError(f"cannot tokenize {text}")
        except ValueError as exc:
            raise InvariantViolation("two owners") from exc

    try:
        tokenize(SECRET)
    except InvariantViolation:
        record = logging.LogRecord("x", logging.ERROR, "", 1, "a bug", None, sys.exc_info())
    written = PrivateFormatter("%(message)s").format(record)
    assert SECRET not in written
    assert "ValueError\nwhich led to" in written
    assert written.endswith("InvariantViolation: two owners")
    assert "in tokenize" in written


def test_a_bug_in_a_worker_ends_it_without_the_text_that_it_stumbled_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def embed(_: WorkerConfig) -> None:
        raise IndexError(f"no token {SECRET}")

    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr("setproctitle.setproctitle", lambda _: None)
    monkeypatch.setattr("twinpool.worker.main.require_kv_host", embed)
    config = WorkerConfig(
        Role.DECODE,
        LinkConfig("tcp://127.0.0.1:1", "decode-0", TEST_TOKEN),
        EngineConfig("nowhere"),
        SchedulerConfig(),
        TransferConfig(),
    )

    assert run_worker(config, lambda *_: pytest.fail("no core without a model")) == EXIT_FAILED
    written = capsys.readouterr().err
    assert "decode-0 ERROR a bug in Twinpool" in written
    assert written.endswith("IndexError\n")
    assert "in embed" in written
    assert SECRET not in written


async def test_a_bug_in_the_gateway_goes_through_the_servers_own_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_self: Tokenizer, text: str, _add_special_tokens: bool = False) -> list[int]:
        raise ValueError(f"cannot tokenize {text}")

    caplog.handler.setFormatter(PrivateFormatter("%(message)s"))
    async with running() as gateway, httpx.AsyncClient() as client:
        monkeypatch.setattr(Tokenizer, "encode", broken)
        response = await client.post(gateway.url + COMPLETIONS, json={"prompt": SECRET})
    assert response.status_code == 500
    assert "in broken" in caplog.text
    assert SECRET not in caplog.text
