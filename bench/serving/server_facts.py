"""What a server says of itself before it is loaded: whose it is, and what it serves."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass

import msgspec

from twinpool.bench.client import Client
from twinpool.bench.serving.settings import ServerKind
from twinpool.errors import ConfigError

_OWNERS = {
    "twinpool": ServerKind.TWINPOOL,
    "vllm": ServerKind.VLLM,
    "sglang": ServerKind.SGLANG,
    "llamacpp": ServerKind.LLAMACPP,
}
_SAID = 200
_POLL_S = 0.1


class NoServer(ConfigError):
    """There is no server, or it does not say what it serves. The message says where and why."""


class _Card(msgspec.Struct):
    id: str
    owned_by: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """From `GET /v1/models`. `root` is where the model came from: a directory or hub id, or its name again.
    `max_model_len` is None where it does not say."""

    kind: ServerKind
    model: str
    root: str
    max_model_len: int | None


async def ask_server(
    base_url: str, api_key: str | None, model: str | None, *, ready_s: float = 0.0, verify_tls: bool = True
) -> ServerFacts:
    """The model named `model`, or the first one that is served. A Twinpool may have `ready_s` to get ready.

    Raises:
        NoServer: nobody answers, not with models, or it is not ready in time.
        ConfigError: the URL is none, or the server has no such model.
    """
    client = Client(base_url, api_key, verify_tls=verify_tls)
    try:
        answer = await client.get("/v1/models")
    except ssl.SSLCertVerificationError as exc:
        raise NoServer(
            f"the server at {base_url} cannot prove who it is ({exc}); --insecure takes any certificate"
        ) from exc
    except ssl.SSLError as exc:
        raise NoServer(f"what answers at {base_url} does not speak TLS ({exc}); is it http://?") from exc
    except (OSError, TimeoutError) as exc:
        why = str(exc) or "no answer in time"
        raise NoServer(f"no server answers at {base_url} ({why}); start one with `twinpool serve`") from exc
    if answer.status != 200:
        raise NoServer(f"{base_url}/v1/models answers {answer.status}: {_excerpt(answer.body)}")
    try:
        cards = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.MsgspecError as exc:
        raise NoServer(f"{base_url}/v1/models has no list of models: {_excerpt(answer.body)}") from exc
    if not cards:
        raise NoServer(f"{base_url} serves no model; wait until it has loaded one")
    card = cards[0] if model is None else next((card for card in cards if card.id == model), None)
    if card is None:
        names = ", ".join(card.id for card in cards)
        raise ConfigError(f"--model is {model!r}; {base_url} serves {names}")
    kind = _OWNERS.get((card.owned_by or "").lower(), ServerKind.OPENAI)
    if kind is ServerKind.TWINPOOL:
        await _wait_ready(client, base_url, ready_s)
    return ServerFacts(
        kind=kind,
        model=card.id,
        root=card.root or card.id,
        max_model_len=card.max_model_len,
    )


async def _wait_ready(client: Client, base_url: str, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while True:
        try:
            answer = await client.get("/ready")
        except (OSError, TimeoutError) as exc:
            raise NoServer(f"the server at {base_url} went away before it was ready: {exc}") from exc
        if answer.status == 200:
            return
        if time.monotonic() >= deadline:
            raise NoServer(
                f"the server at {base_url} is not ready after {ready_s:g} s: {_excerpt(answer.body)}"
            )
        await asyncio.sleep(_POLL_S)


def _excerpt(body: bytes) -> str:
    return body[:_SAID].decode(errors="replace")
