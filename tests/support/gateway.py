"""A coordinator that plays a script, and a small real tokenizer: what the gateway's tests put behind it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from twinpool.coordinator.gateway.connection import CONNECTION
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.service import Output, RequestFacts, Service, Submission, Take
from twinpool.coordinator.tenants import Allowances, Tenant
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import NoWorker, RequestCancelled, RequestError, UnknownRequest
from twinpool.request import FinishReason, TokenLogprobs

MODEL = "tiny"
CORPUS = ["the quick brown fox jumps over the lazy dog and the capital of France is Paris " * 4]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix }}"
)
SILENCE = object()
"""A step of a script: from here on nothing comes."""

Script = Callable[[Submission], Iterable[object] | AsyncIterator[object]]
"""What a request gets: outputs, perhaps then an error or silence."""


@cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with a few merges: any text is a token sequence, and characters spread over tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    eos = backend.token_to_id("<|im_end|>")
    assert eos is not None
    return Tokenizer(backend, (eos,), ChatTemplate(CHAT_TEMPLATE, {"eos_token": "<|im_end|>"}))


def outputs(token_ids: Sequence[int], splits: Sequence[int], finish: FinishReason) -> list[Output]:
    """The token ids as outputs that end at the indices `splits` and at the end."""
    borders = sorted({0, len(token_ids), *(s for s in splits if 0 < s < len(token_ids))})
    pieces = list(itertools.pairwise(borders))
    return [Output(tuple(token_ids[a:b]), a, finish if b == len(token_ids) else None) for a, b in pieces] or [
        Output((), 0, finish)
    ]


def says(text: str, finish: FinishReason = FinishReason.STOP) -> Script:
    """A script that answers `text` token by token, and with EOS if it stops."""
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer.encode(text) + (
        list(tokenizer.eos_token_ids) if finish is FinishReason.STOP else []
    )
    return lambda _: outputs(token_ids, range(len(token_ids)), finish)


def logprobs_of(token_id: int, place: int, num_top: int) -> TokenLogprobs:
    """How likely the scripted model holds a token that comes after `place` others: at every even place it is the
    likeliest, else none of the likeliest."""
    ids = [(token_id + 5 * rank) % tiny_tokenizer().vocab_size for rank in range(num_top + 1)]
    values = [-rank / 4 - (token_id % 8) / 64 for rank in range(num_top + 1)]
    likeliest = tuple(zip(ids, values, strict=True))
    if place % 2 == 0:
        return TokenLogprobs(values[0], likeliest[:num_top])
    return TokenLogprobs(values[-1], tuple(zip(ids[1:], values, strict=False))[:num_top])


def with_logprobs(step: Output, submission: Submission) -> Output:
    """The output with the log probabilities that its request asks for."""
    sampling, prompt = submission.sampling, submission.prompt_token_ids
    if sampling.logprobs is not None and step.token_ids and not step.logprobs:
        first = len(prompt) + step.first_index
        step = step._replace(
            logprobs=tuple(
                logprobs_of(id_, first + i, sampling.logprobs) for i, id_ in enumerate(step.token_ids)
            )
        )
    if sampling.prompt_logprobs is not None and step.token_ids and step.first_index == 0:
        places = enumerate(prompt[1:], start=1)
        step = step._replace(
            prompt_logprobs=tuple(logprobs_of(id_, place, sampling.prompt_logprobs) for place, id_ in places)
        )
    return step


class IdleConnection:
    """A connection whose client takes everything at once: parts go to the ASGI server's `send`, which must not wait."""

    def __init__(self, send: Send | None = None) -> None:
        self._send = send
        self.backlog_bytes = 0
        self.on_stall: Callable[[], None] | None = None
        self.is_gone = False
        self.is_paused = False
        self.buffered_bytes = 0

    def write_part(self, body: bytes) -> None:
        assert self._send is not None
        sending = self._send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(StopIteration):
            sending.send(None)  # type: ignore[attr-defined]  # it is a coroutine

    async def until_writable(self) -> None:
        """Returns at once."""

    def give_up(self) -> None:
        raise AssertionError("a client that takes everything is not too slow")


def in_process(app: ASGIApp, *, raise_app_exceptions: bool = False) -> httpx.ASGITransport:
    """Speaks to the gateway `app` without a socket, each request over an `IdleConnection` of its own."""

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION] = IdleConnection(send)
        await app(scope, receive, send)

    return httpx.ASGITransport(connected, raise_app_exceptions=raise_app_exceptions)  # type: ignore[arg-type]


class ScriptedService:
    """A `Service` whose requests all get the outputs of `script`. It records what the gateway does."""

    def __init__(self, max_model_len: int = 256) -> None:
        self._max_model_len: int | None = max_model_len
        self.script: Script = says("Hello")
        self.refusal: Exception | None = None
        self.refused_from = 0
        self.refusal_unheard: Exception | None = None
        self.num_cached = 0
        self.forgets_facts = False
        self.left: dict[str, Allowances] = {}
        self.knocks: list[tuple[str, str, int]] = []
        self.ready_answer = (True, "")
        self.health_answer = (True, "nothing to do")
        self.submissions: list[Submission] = []
        self.ended: list[str] = []
        self.completed: list[tuple[str, int]] = []
        self.abandoned: list[str] = []
        self.cuts: list[tuple[str, RequestError]] = []
        self.delivered_ids: list[str] = []
        self.on_delivered: Callable[[], object] = lambda: None
        self.changed = asyncio.Condition()
        self._cancelled: dict[str, asyncio.Event] = {}

    @property
    def submission(self) -> Submission:
        """The only request so far."""
        (submission,) = self.submissions
        return submission

    def assert_settled(self) -> None:
        """Every request came to exactly one end."""
        stopped = [request_id for request_id, _ in self.completed if request_id not in self.ended]
        cut = [request_id for request_id, _ in self.cuts]
        ends = sorted([*self.ended, *self.abandoned, *stopped, *cut])
        assert ends == sorted(submission.request_id for submission in self.submissions)

    @property
    def max_model_len(self) -> int:
        if self._max_model_len is None:
            raise NoWorker("no worker has joined")
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, value: int | None) -> None:
        self._max_model_len = value

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition()` has become true through a call of the gateway; fails after 10 s."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def knock(self, request_id: str, tenant: Tenant, priority: int) -> None:
        self.knocks.append((request_id, tenant.name, priority))
        if self.refusal_unheard is not None:
            raise self.refusal_unheard

    def submit(self, submission: Submission, take: Take | None = None) -> AsyncIterator[Output]:
        if self.refusal is not None and len(self.submissions) >= self.refused_from:
            raise self.refusal
        self.submissions.append(submission)
        self._note()
        return self._play(submission, take)

    async def _play(self, submission: Submission, take: Take | None) -> AsyncIterator[Output]:
        steps = self.script(submission)
        num_given = 0
        cancelled = self._cancelled[submission.request_id] = asyncio.Event()
        async for step in steps if isinstance(steps, AsyncIterator) else _as_async(steps):
            if step is SILENCE:
                await cancelled.wait()
            if cancelled.is_set():
                step = RequestCancelled("the request was cancelled")
            if isinstance(step, RequestError):
                step = Output((), num_given, FinishReason.ERROR, step)
            assert isinstance(step, Output)
            step = with_logprobs(step, submission)
            num_given += len(step.token_ids)
            if step.finish is not None:
                self.ended.append(submission.request_id)
                yield step
                return
            if take is None or not take(step):
                yield step
            if submission.request_id in [request_id for request_id, _ in self.completed]:
                return

    def allowances(self, tenant: Tenant) -> Allowances:
        return self.left.get(tenant.name, Allowances())

    def facts(self, request_id: str) -> RequestFacts:
        if self.forgets_facts:
            raise UnknownRequest(f"no request {request_id!r} is known")
        (submission,) = [s for s in self.submissions if s.request_id == request_id]
        cached = min(self.num_cached, len(submission.prompt_token_ids))
        return RequestFacts(cached, len(submission.prompt_token_ids) - cached, 0, 0, 0.1, 0.2, 0.05, 0.4)

    def complete(self, request_id: str, num_output_tokens: int) -> None:
        self.completed.append((request_id, num_output_tokens))
        self._note()

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)
        self._note()

    def cancel(self, request_id: str, tenant: Tenant) -> None:
        owners = [s.tenant.name for s in self.submissions if s.request_id == request_id]
        if owners != [tenant.name]:
            raise UnknownRequest(f"no request {request_id!r}")
        self._cancelled[request_id].set()

    def cut(self, request_id: str, error: RequestError) -> None:
        self.cuts.append((request_id, error))
        self._note()

    def health(self) -> tuple[bool, str]:
        return self.health_answer

    def delivered(self, request_id: str) -> None:
        self.delivered_ids.append(request_id)
        self.on_delivered()
        self._note()

    def timeline(self, request_id: str) -> Mapping[str, Any]:
        if request_id not in [submission.request_id for submission in self.submissions]:
            raise UnknownRequest(f"no request {request_id!r} is known", param="request_id")
        return {"request_id": request_id, "stages": []}

    def ready(self) -> tuple[bool, str]:
        return self.ready_answer

    def metrics_text(self) -> bytes:
        return b"# TYPE twinpool_requests_total counter\ntwinpool_requests_total 0\n"

    def _note(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._noting = asyncio.ensure_future(notify())


class Stage:
    """A gateway whose scripted coordinator is another one for each play: a new gateway takes tens of milliseconds."""

    def __init__(self) -> None:
        self.service = ScriptedService()
        self.app = create_app(cast("Service", _Onstage(self)), tiny_tokenizer(), MODEL)

    @contextlib.asynccontextmanager
    async def playing(self, script: Script) -> AsyncIterator[tuple[ScriptedService, httpx.AsyncClient]]:
        """A new coordinator that plays `script`, and a client; every request must be settled when the block ends."""
        self.service = ScriptedService()
        self.service.script = script
        transport = in_process(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield self.service, client
        self.service.assert_settled()


class _Onstage:
    """Whichever coordinator is on stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.service, name)


async def _as_async(steps: Iterable[object]) -> AsyncIterator[object]:
    for step in steps:
        yield step


def events(body: str) -> list[Any]:
    """The data of a stream's events: JSON values, and "[DONE]" as it is. Comments are left out."""
    data = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def named_events(body: str) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which must have its type as its name."""
    found = []
    for event in body.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after checking that it has this status and the OpenAI shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"]
    return error
