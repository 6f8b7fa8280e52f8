"""The `openai` client comes back when the server says so: twice at most, unless its user wants it otherwise."""

from __future__ import annotations

import anyio
import openai
import pytest
from support.gateway import MODEL, says
from support.http_gateway import running

from twinpool.errors import QueueFull


async def ask(monkeypatch: pytest.MonkeyPatch, waits_s: list[float]) -> tuple[str | None, list[float]]:
    """What the client gets of a server that refuses it with these waits in turn, and how long it slept each time."""
    slept_s: list[float] = []
    refusals = [QueueFull("the queue is full", retry_after_s=wait_s) for wait_s in waits_s]
    async with running() as gateway:
        gateway.service.script = says("Paris.")
        gateway.service.refusal_unheard = refusals[0]

        async def sleep(seconds: float) -> None:
            slept_s.append(seconds)
            gateway.service.refusal_unheard = dict(enumerate(refusals)).get(len(slept_s))

        monkeypatch.setattr(anyio, "sleep", sleep)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}]
            )
    return answer.choices[0].message.content, slept_s


async def test_it_waits_as_long_as_it_is_told_and_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the millisecond, which whole seconds would not do."""
    assert await ask(monkeypatch, [1.25, 2.5]) == ("Paris.", [1.25, 2.5])


async def test_a_third_refusal_is_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.RateLimitError, match="the queue is full"):
        await ask(monkeypatch, [1.0, 1.0, 1.0])
