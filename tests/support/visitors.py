"""Clients of a real server: one that reads its whole answer, and one that can leave at any moment."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.server import Server, wait_for

ANSWER_LIMIT_S = 60.0
ROUTE = "/v1/completions"


@dataclass
class Answer:
    """All that a client got. `finish` is the finish reason, "error" for an error event or status, or "broken" for a
    stream without a terminal event; `usages` are those that came, of which there must be one at most."""

    status: int = 200
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = "broken"
    error: str = ""
    usages: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def outcome(self) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
        """What must be equal for two answers to be the same: text, tokens, finish reason, and what is billed, which is
        the same whatever was found in a cache."""
        (usage,) = self.usages
        billed = sorted(count for name, count in usage.items() if name != "prompt_tokens_details")
        return self.text, tuple(self.token_ids), self.finish, tuple(billed)


def request_body(**fields: Any) -> dict[str, Any]:
    """A greedy completion that gives its token ids, unless `fields` say otherwise."""
    return {"temperature": 0, "return_token_ids": True, **fields}


def ask(server: Server, *, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    """One request, not streamed."""
    response = httpx.post(
        server.url + ROUTE,
        json=request_body(**fields),
        headers=headers,
        timeout=ANSWER_LIMIT_S,
        verify=False,
    )
    body = response.json()
    if response.status_code != 200:
        return Answer(response.status_code, finish="error", error=body["error"]["message"])
    (choice,) = body["choices"]
    return Answer(200, choice["text"], choice["token_ids"], choice["finish_reason"], usages=[body["usage"]])


def stream(server: Server, *, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    """One request, streamed to its end."""
    body = request_body(stream=True, stream_options={"include_usage": True}, **fields)
    answer = Answer()
    with httpx.stream(
        "POST", server.url + ROUTE, json=body, headers=headers, timeout=ANSWER_LIMIT_S, verify=False
    ) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            error = json.loads(response.read())["error"]
            answer.finish, answer.error = "error", error["message"]
            return answer
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    for line in lines:
        _take(answer, line)
    return answer


def _take(answer: Answer, line: str) -> None:
    if line == "[DONE]":
        return
    event = json.loads(line)
    if "error" in event:
        answer.finish, answer.error = "error", event["error"]["message"]
        return
    answer.usages += [event["usage"]] if event.get("usage") else []
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.token_ids += choice.get("token_ids") or []
        if choice["finish_reason"]:
            assert answer.finish == "broken", "a second finish reason"
            answer.finish = choice["finish_reason"]


def _states(story: Mapping[str, Any]) -> list[str]:
    return [entry["state"] for entry in story.get("states", [])]


class Visitor:
    """A client on a connection of its own, which it may break off at any moment."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.server = server
        self.request_id = f"visitor-{uuid.uuid4().hex[:12]}"
        body = json.dumps(request_body(stream=True, **fields)).encode()
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S)
        head = (
            f"POST {ROUTE} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: {self.request_id}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)

    def timeline(self) -> dict[str, Any]:
        """The server's story of this request; empty before it knows of it."""
        response = self.server.get(f"/v1/requests/{self.request_id}/timeline")
        return dict(response.json()) if response.status_code == 200 else {}

    def states(self) -> list[str]:
        """The states that it has been in, in order."""
        return _states(self.timeline())

    def states_of_each(self) -> list[list[str]]:
        """The same of one that asked for several answers: of each that the server knows of."""
        return [_states(choice) for choice in self.timeline().get("choices", [])]

    def wait_until(self, *states: str) -> str:
        """Waits until it is, or was, in one of `states`; returns the present one."""
        wait_for(f"{self.request_id} is {states}", lambda: not set(states).isdisjoint(self.states()), 30)
        return self.states()[-1]

    def read_some(self, limit_s: float = ANSWER_LIMIT_S) -> bytes:
        """Waits for the next bytes of the answer, not longer than `limit_s`; none at its end. Raises TimeoutError."""
        self._socket.settimeout(limit_s)
        return self._socket.recv(65536)

    def read_all(self) -> Answer:
        """The whole answer, from here on."""
        data = b""
        while more := self.read_some():
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        answer = Answer()
        if head.startswith(b"HTTP/"):
            answer.status = int(head.split()[1])
        if answer.status != 200:
            answer.finish, answer.error = "error", json.loads(body)["error"]["message"]
            return answer
        for line in data.decode().splitlines():
            if line.startswith("data: "):
                _take(answer, line.removeprefix("data: "))
        return answer

    def read_for(self, seconds: float) -> None:
        """Reads what comes within `seconds`, or until the answer ends."""
        until = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while (left := until - time.monotonic()) > 0 and self.read_some(left):
                pass

    def leave(self) -> None:
        """Breaks the connection off."""
        self._socket.close()


Visit = Callable[..., Visitor]
