"""A reply and its ASGI server: what is sent, when, and what a stuck or broken connection does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support.gateway import MODEL, SILENCE, IdleConnection, ScriptedService, tiny_tokenizer

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer import Answer
from twinpool.coordinator.gateway.chat_shape import ChatShape
from twinpool.coordinator.gateway.prompts import Prompt
from twinpool.coordinator.gateway.reply import Reply
from twinpool.coordinator.gateway.request_ids import RequestIds
from twinpool.coordinator.gateway.requests import GenerationRequest
from twinpool.coordinator.gateway.shapes import Heading
from twinpool.coordinator.gateway.strand import Strand
from twinpool.coordinator.gateway.streamed_reply import StreamedReply
from twinpool.coordinator.gateway.token_texts import TokenTexts
from twinpool.coordinator.gateway.whole_reply import WholeReply
from twinpool.coordinator.service import Output, Submission, Take
from twinpool.coordinator.tenants import ANYONE
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.errors import RequestFailed
from twinpool.request import FinishReason, SamplingParams

THE = tuple(tiny_tokenizer().encode("the"))
FOX = tuple(tiny_tokenizer().encode(" fox"))
PATIENT = GatewayConfig()
HASTY = GatewayConfig(keep_alive_s=0.001, max_silence_s=0.01)


class Connection(IdleConnection):
    """The server's side of ASGI: records what is sent; `stuck_after` messages it takes no more."""

    def __init__(self, stuck_after: int | None = None) -> None:
        super().__init__(self.send)
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self._stuck_after = stuck_after

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._stuck_after is not None and len(self.sent) >= self._stuck_after:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


def reply_to(
    service: ScriptedService,
    kind: type[Reply],
    connection: Connection,
    limits: GatewayConfig = PATIENT,
    stop: tuple[str, ...] = (),
    num_choices: int = 1,
) -> Reply:
    claim = RequestIds().claim(ANYONE, "r", connection)
    claim.num_choices = num_choices
    wanted = GenerationRequest(prompts=((1, 2),), n=num_choices, stop=stop)
    strands = [
        Strand(
            service,
            Submission(id_, (1, 2), SamplingParams(max_tokens=9, seed=1), 0.0, 0.0, 0.0),
            Answer(IncrementalDetokenizer(tiny_tokenizer()), wanted.rules),
        )
        for id_ in claim.strand_ids
    ]
    heading = Heading("r", MODEL, 0, wanted, (Prompt((1, 2)),), TokenTexts(tiny_tokenizer()))
    return kind(strands, ChatShape(heading), heading, limits, claim)


async def run(reply: Reply, connection: Connection) -> None:
    await asyncio.wait_for(reply({"type": "http"}, connection.receive, connection.send), 10)


async def test_each_output_is_one_body_part() -> None:
    service = ScriptedService()
    service.script = lambda _: [Output(THE, 0), Output(FOX, len(THE), FinishReason.LENGTH)]
    connection = Connection()
    await run(reply_to(service, StreamedReply, connection), connection)
    assert [message["type"] for message in connection.sent] == ["http.response.start"] + [
        "http.response.body"
    ] * 2
    assert [message["more_body"] for message in connection.sent[1:]] == [True, False]


async def test_after_the_first_output_the_next_ones_need_no_task() -> None:
    service, connection = ScriptedService(), Connection()
    takes: list[Take] = []
    submit = service.submit
    service.submit = lambda submission, take=None: submit(submission, takes.append(take))  # type: ignore[method-assign]
    service.script = lambda _: [Output(THE, 0), SILENCE]
    running = asyncio.create_task(run(reply_to(service, StreamedReply, connection), connection))
    await service.until(lambda: service.delivered_ids == ["r"])
    (take,) = takes
    assert take(Output(FOX, len(THE)))
    assert b" fox" in connection.bodies[-1]
    connection.is_paused = True
    assert not take(Output(FOX, len(THE + FOX)))
    assert len(connection.bodies) == 2
    connection.left.set()
    await running


async def test_a_stop_string_ends_an_answer_that_is_written_at_once() -> None:
    service, connection = ScriptedService(), Connection()
    service.script = lambda _: [Output(THE, 0), Output(FOX, len(THE)), Output(FOX, len(THE + FOX))]
    await run(reply_to(service, StreamedReply, connection, stop=("fo",)), connection)
    assert service.completed == [("r", 2)]
    assert [message.get("more_body") for message in connection.sent[1:]] == [True, False]
    assert b"[DONE]" in connection.bodies[-1]


async def test_delivered_follows_the_first_text_and_comes_once() -> None:
    service = ScriptedService()
    euro = tuple(tiny_tokenizer().encode("€"))
    assert len(euro) == 3
    steps = [Output((id_,), i) for i, id_ in enumerate(euro)]
    service.script = lambda _: [*steps, Output(THE, 3, FinishReason.LENGTH)]
    connection = Connection()
    seen: list[int] = []
    service.on_delivered = lambda: seen.append(len(connection.bodies))
    await run(reply_to(service, StreamedReply, connection), connection)
    assert "€".encode() in connection.bodies[seen[0] - 1]
    assert len(seen) == 1


async def test_a_whole_answer_is_delivered_when_it_is_sent() -> None:
    service = ScriptedService()
    connection = Connection()
    seen: list[int] = []
    service.on_delivered = lambda: seen.append(len(connection.bodies))
    await run(reply_to(service, WholeReply, connection), connection)
    assert seen == [1]
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-length"] == str(len(connection.bodies[0])).encode()


@pytest.mark.parametrize("stuck_after", [0, 1, 2])
async def test_a_client_that_takes_nothing_more_is_let_go(stuck_after: int) -> None:
    service = ScriptedService()
    service.script = lambda _: [Output(THE, 0), Output(THE, len(THE)), Output(THE, 2 * len(THE))]
    connection = Connection(stuck_after)
    await run(reply_to(service, StreamedReply, connection, HASTY), connection)
    assert service.abandoned == ["r"]
    assert len(connection.sent) == stuck_after


async def test_a_keep_alive_that_does_not_get_through_hides_no_disconnect() -> None:
    service = ScriptedService()
    service.script = lambda _: [SILENCE]
    connection = Connection(stuck_after=0)
    timing = GatewayConfig(keep_alive_s=0.001)
    running = asyncio.create_task(run(reply_to(service, StreamedReply, connection, timing), connection))
    await service.until(lambda: len(service.submissions) == 1)
    connection.left.set()
    await running
    assert service.abandoned == ["r"]


async def test_an_error_event_that_nobody_takes_is_given_up() -> None:
    service = ScriptedService()
    service.script = lambda _: [Output(THE, 0), RequestFailed("decode-0 is gone")]
    connection = Connection(stuck_after=2)
    await run(reply_to(service, StreamedReply, connection, GatewayConfig(keep_alive_s=0.001)), connection)
    assert len(connection.sent) == 2
    service.assert_settled()


@pytest.mark.parametrize("kind", [StreamedReply, WholeReply])
@pytest.mark.parametrize("given", [0, 1])
async def test_leaving_abandons_once_and_is_no_error(kind: type[Reply], given: int) -> None:
    service = ScriptedService()
    service.script = lambda _: [*[Output(THE, 0)] * given, SILENCE]
    connection = Connection()
    running = asyncio.create_task(run(reply_to(service, kind, connection), connection))
    await service.until(lambda: len(service.submissions) == 1)
    connection.left.set()
    await running
    assert service.abandoned == ["r"]


async def test_a_cancelled_reply_abandons_and_stays_cancelled() -> None:
    service = ScriptedService()
    service.script = lambda _: [SILENCE]
    connection = Connection()
    running = asyncio.create_task(run(reply_to(service, StreamedReply, connection), connection))
    await service.until(lambda: len(service.submissions) == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert service.abandoned == ["r"]


async def test_a_refused_request_is_not_abandoned() -> None:
    service = ScriptedService()
    service.refusal = ValueError("refused")
    connection = Connection()
    with pytest.raises(ValueError, match="refused"):
        await run(reply_to(service, WholeReply, connection), connection)
    assert service.abandoned == []


async def test_nothing_keeps_running_after_a_reply() -> None:
    before = asyncio.all_tasks()
    kinds: tuple[Callable[..., Reply], ...] = (StreamedReply, WholeReply)
    for kind in kinds:
        service, connection = ScriptedService(), Connection()
        await run(reply_to(service, kind, connection), connection)  # type: ignore[arg-type]
        service.assert_settled()
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("kind", [StreamedReply, WholeReply])
async def test_nothing_of_a_reply_is_left_for_the_garbage_collector(kind: type[Reply]) -> None:
    service, connection = ScriptedService(), Connection()
    reply = reply_to(service, kind, connection, num_choices=2)
    await run(reply, connection)
    alive = weakref.ref(reply)
    gc.disable()
    try:
        del reply
        assert alive() is None
    finally:
        gc.enable()
