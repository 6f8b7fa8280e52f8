"""`twinpool chat` against a real HTTP server that streams what the test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from twinpool.cli import main

TEXTS = ("Par", "is, ", "naïve 👍", ".")


def event(delta: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


WHOLE = (
    event({"role": "assistant", "content": ""})
    + ": a comment\n\n"
    + "".join(event({"content": text}) for text in TEXTS)
    + f"data: {json.dumps({'choices': [], 'usage': {'total_tokens': 9}})}\n\n"
    + "data: [DONE]\n\n"
)


class FakeServer:
    """Lists one model and answers every chat with `status` and `body`; remembers the requests."""

    def __init__(self) -> None:
        self.status = 200
        self.body = WHOLE
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                self._send(200, json.dumps({"data": [{"id": "the-model"}]}))

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._send(outer.status, outer.body)

            def _send(self, status: int, body: str) -> None:
                outer.keys.add(self.headers["Authorization"])
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """What the user types, then Ctrl-D."""
    waiting = iter((*lines, EOFError()))

    def read(_: str) -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_one_question_prints_the_streamed_answer(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--system", "Be brief.", "--max-tokens", "7", "--temperature", "0")
    assert main(["chat", "Capital of France?", "--url", f"{server.url}/v1/", *options]) == 0
    assert capsys.readouterr().out == "Paris, naïve 👍.\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]
    wanted = {"model": "the-model", "messages": messages, "stream": True, "max_tokens": 7, "temperature": 0.0}
    assert server.asked == [wanted]


def test_a_conversation_carries_its_history(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "first", "  ", KeyboardInterrupt(), "second")
    assert main(["chat", "--url", server.url]) == 0
    assert [message["content"] for message in server.asked[1]["messages"]] == [
        "first",
        "".join(TEXTS),
        "second",
    ]
    out = capsys.readouterr().out
    assert out.startswith(f"the-model at {server.url}")
    assert out.count("Paris") == 2
    assert "(Ctrl-D leaves)" in out


def test_an_interrupted_answer_is_kept_as_far_as_it_was_shown(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> Iterator[str]:
        yield "Par"
        raise KeyboardInterrupt

    type_lines(monkeypatch, "first", "second")
    monkeypatch.setattr("twinpool.commands.chat._texts", interrupted)
    assert main(["chat", "--url", server.url]) == 0
    assert "Par [stopped]\n" in capsys.readouterr().out
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "Par"}


def test_a_refusal_is_shown_in_the_servers_words(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.body = 429, json.dumps({"error": {"message": "the queue is full"}})
    assert main(["chat", "hi", "--url", server.url]) == 1
    assert capsys.readouterr().err == "twinpool: the queue is full (HTTP 429)\n"


def test_a_refusal_in_a_conversation_does_not_end_it(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status, server.body = 503, "busy"
    type_lines(monkeypatch, "first", "second")
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().err.count("twinpool: busy (HTTP 503)") == 2
    assert [message["content"] for message in server.asked[1]["messages"]] == ["second"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (event({"content": "Par"}), "the stream broke off before the answer was complete"),
        (event({"content": "Par"}) + 'data: {"error": {"message": "worker lost"}}\n\n', "worker lost"),
    ],
)
def test_an_answer_without_its_end_is_no_answer(
    server: FakeServer, capsys: pytest.CaptureFixture[str], body: str, sentence: str
) -> None:
    server.body = body
    assert main(["chat", "hi", "--url", server.url]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:port"])
def test_no_server_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["chat", "hi", "--url", url]) == 2
    error = capsys.readouterr().err
    assert f"no server answers at {url}" in error
    assert "twinpool serve" in error


def test_a_server_of_another_kind_is_named(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "hi", "--model", "m", "--url", server.url]) == 0
    server.status, server.body = 404, "<html>not found</html>"
    assert main(["chat", "hi", "--model", "m", "--url", server.url]) == 1
    assert "<html>not found</html> (HTTP 404)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "variable", "sent"),
    [
        ([], None, None),
        ([], "from-environment", "Bearer from-environment"),
        (["--api-key", "from-flag"], "from-environment", "Bearer from-flag"),
    ],
)
def test_a_key_goes_with_every_request(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variable: str | None,
    sent: str | None,
) -> None:
    if variable is not None:
        monkeypatch.setenv("TWINPOOL_API_KEY", variable)
    assert main(["chat", "--url", server.url, *flags, "Hi"]) == 0
    assert server.keys == {sent}
