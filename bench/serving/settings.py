"""How a load is sent: where to, in which words, and by how many processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from twinpool.bench.http1 import Address
from twinpool.config import require


class Endpoint(StrEnum):
    """Which of the OpenAI routes is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class ServerKind(StrEnum):
    """Whose server it is: what it takes beyond OpenAI's fields."""

    TWINPOOL = "twinpool"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"
    """Any other: it is sent nothing that OpenAI does not know."""


TAKE_SALTS = frozenset({ServerKind.TWINPOOL, ServerKind.VLLM})
"""Their prefix caches find nothing that came with another `cache_salt`."""
PATHS = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """One load's settings.

    `max_concurrency` bounds what runs at once: arrivals beyond it wait, and their intended times stay. `num_clients`
    makes it a closed loop. Both are shared out among the processes. `limit_s` bounds each request from its sending.
    `cores` are those that the senders run on, empty: any. `tokenizer_file` (a tokenizer.json) counts the tokens of
    chunks that do not say how many they have. `keep_output` keeps the text of every answer.
    """

    base_url: str
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    path: str = ""
    """Where it differs from the endpoint's usual one."""
    kind: ServerKind = ServerKind.OPENAI
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[str, ...] = field(default=(), repr=False)
    """Whole lines."""
    max_concurrency: int | None = None
    num_clients: int | None = None
    limit_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool | None = None
    """None: where the server is known to take it."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    keep_output: bool = False
    with_timelines: bool = True
    """Join what the server says of each request, if it is a Twinpool."""
    tokenizer_file: str | None = None
    verify_tls: bool = True
    request_id_prefix: str = ""
    """Of each request's id, which ends with its index. Empty: drawn for each run."""
    num_processes: int = 1
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Address.parse("--base-url", self.base_url)
        require("--senders", self.num_processes, self.num_processes >= 1, "1 or more")
        for flag, count in (("--max-concurrency", self.max_concurrency), ("--num-clients", self.num_clients)):
            allowed = f"at least 1 for each of {self.num_processes} sender processes"
            require(flag, count, count is None or count >= self.num_processes, allowed)
        require("--timeout", self.limit_s, 0 < self.limit_s < math.inf, "above 0 seconds")

    @property
    def request_path(self) -> str:
        """What is asked."""
        return self.path or PATHS[self.endpoint]

    @property
    def ignores_eos(self) -> bool:
        """Whether answers are to be as long as planned."""
        takes_it = self.kind in (ServerKind.TWINPOOL, ServerKind.VLLM, ServerKind.SGLANG)
        return takes_it if self.ignore_eos is None else self.ignore_eos

    def shown(self) -> dict[str, Any]:
        """As JSON values by name, without what is secret."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("api_key", "headers", "tokenizer_file")
        }
