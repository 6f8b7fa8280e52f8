"""A sender process: reads its plan, sends it at its times, reports. `generator.py` starts and feeds it.

Its standard streams carry `sender_messages`. It ends when its standard input does, so it never outlives who started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import BinaryIO

import uvloop
import xxhash

from twinpool.bench.serving.load_loop import Ask, LoadLoop
from twinpool.bench.serving.record import Chunk, RequestRecord, Sender, TokenCount
from twinpool.bench.serving.sender_messages import (
    Begin,
    Finished,
    Plan,
    Ready,
    Refused,
    Tick,
    read_by_sender,
    write,
)
from twinpool.bench.serving.token_counts import TokenEnds, chunk_tokens, token_ends_by
from twinpool.errors import ConfigError

_BYTES_PER_ID = 8


def main() -> int:
    """Runs one plan. Returns 0, or 1 if whoever started it went away before the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it, and comes from there as Stop
    _allow_many_connections()
    orders, reports = open(0, "rb", buffering=0), open(1, "wb", buffering=0)  # noqa: SIM115  # for life
    plan = read_by_sender(orders)
    if not isinstance(plan, Plan):
        return 1
    if plan.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {plan.core})
    with contextlib.suppress(BrokenPipeError):
        return _serve(plan, orders, reports)
    return 1


def _serve(plan: Plan, orders: BinaryIO, reports: BinaryIO) -> int:
    def report_tick(tick: Tick) -> None:
        write(reports, tick)

    try:
        load = LoadLoop(plan, plan.settings.request_id_prefix, report_tick)
    except ConfigError as exc:
        write(reports, Refused(str(exc)))
        return 0
    # Looking for garbage in cycles takes many milliseconds with so many objects, and there is next to none.
    gc.collect()
    gc.freeze()
    gc.disable()
    write(reports, Ready())
    begin = read_by_sender(orders)
    if not isinstance(begin, Begin):
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(load, begin.at, orders))
    write(reports, _finished(plan, load, begin.at))
    return 0


async def _until_stopped(load: LoadLoop, begins_at: float, orders: BinaryIO) -> None:
    loop = asyncio.get_running_loop()

    def heard() -> None:  # Stop, or the end: there is nothing else that could come
        loop.remove_reader(orders)
        load.stop()

    loop.add_reader(orders, heard)
    await load.run(begins_at)
    loop.remove_reader(orders)


def _finished(plan: Plan, load: LoadLoop, begins_at: float) -> Finished:
    settings = plan.settings
    ends = None if settings.tokenizer_file is None else token_ends_by(settings.tokenizer_file)
    records = tuple(
        record(ask, begins_at, ends, keep_output=settings.keep_output)
        for ask in load.asks
        if ask.ended_at is not None
    )
    duration_s = load.duration_s
    sender = Sender(
        num_requests=len(records),
        cpu_share=load.cpu_s / duration_s if duration_s else 0.0,
        send_lags_s=tuple(load.send_lags_s),
        loop_stalls_s=tuple(sorted(load.stalls_s, reverse=True)),
        stalled_share=load.stalled_s / duration_s if duration_s else 0.0,
    )
    return Finished(records=records, sender=sender)


def record(ask: Ask, begins_at: float, ends: TokenEnds | None, *, keep_output: bool) -> RequestRecord:
    """What the client of one request, which has ended, saw."""
    assert ask.ended_at is not None, "it has ended"
    answer, planned = ask.answer, ask.planned
    sent_at = ask.ended_at if ask.sent_at is None else ask.sent_at
    chunks: tuple[Chunk, ...] = ()
    token_count, text = TokenCount.CHUNK, ""
    input_tokens, output_tokens, cached_tokens = planned.input_tokens, None, None
    if answer is not None:
        counts, token_count = chunk_tokens(answer, ends)
        chunks = tuple(Chunk(at - begins_at, count) for at, count in zip(answer.times, counts, strict=True))
        text = "".join(answer.texts)
        if (usage := answer.usage) is not None:
            input_tokens = input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
            output_tokens = usage.completion_tokens
            details = usage.prompt_tokens_details
            cached_tokens = None if details is None else details.cached_tokens
    return RequestRecord(
        index=planned.index,
        request_id=ask.request_id if answer is None else answer.headers.get("x-request-id", ask.request_id),
        group=planned.group,
        intended_at_s=ask.intended_at - begins_at,
        sent_at_s=sent_at - begins_at,
        ended_at_s=ask.ended_at - begins_at,
        ending=ask.ending,
        input_tokens=input_tokens,
        wanted_output_tokens=planned.output_tokens,
        output_tokens=sum(chunk.num_tokens for chunk in chunks) if output_tokens is None else output_tokens,
        chunks=chunks,
        token_count=token_count,
        finish_reason=None if answer is None else answer.finish_reason,
        status=0 if answer is None else answer.status,
        error=ask.error,
        cached_tokens=cached_tokens,
        output_digest=output_digest((), "") if answer is None else output_digest(answer.token_ids, text),
        output=text if keep_output and answer is not None else None,
    )


def output_digest(token_ids: Sequence[int], text: str) -> str:
    """The same for the same output; it says whether it is of token ids or, where there are none, of the text."""
    if token_ids:
        data = b"".join(token_id.to_bytes(_BYTES_PER_ID, "little", signed=True) for token_id in token_ids)
        return f"ids:{xxhash.xxh3_128_hexdigest(data)}"
    return f"text:{xxhash.xxh3_128_hexdigest(text.encode())}" if text else ""


def _allow_many_connections() -> None:
    """As many open connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
