"""What a server says of itself before it is loaded: whose it is, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from twinpool.bench.client import Client
from twinpool.bench.serving.settings import ServerKind
from twinpool.errors import ConfigError, TwinpoolError

_OWNERS = {
    "twinpool": ServerKind.TWINPOOL,
    "vllm": ServerKind.VLLM,
    "sglang": ServerKind.SGLANG,
    "llamacpp": ServerKind.LLAMACPP,
}
_SAID = 200


class NoServer(TwinpoolError):
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
    base_url: str, api_key: str | None, model: str | None, *, verify_tls: bool = True
) -> ServerFacts:
    """The model named `model`, or the first one that is served.

    Raises:
        NoServer: nobody answers, or not with models.
        ConfigError: the URL is none, or the server has no such model.
    """
    client = Client(base_url, api_key, verify_tls=verify_tls)
    try:
        answer = await client.get("/v1/models")
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
    return ServerFacts(
        kind=_OWNERS.get((card.owned_by or "").lower(), ServerKind.OPENAI),
        model=card.id,
        root=card.root or card.id,
        max_model_len=card.max_model_len,
    )


def _excerpt(body: bytes) -> str:
    return body[:_SAID].decode(errors="replace")
