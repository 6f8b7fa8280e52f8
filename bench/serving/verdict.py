"""Whether a run measured the server, or the load generator itself, and whether enough of it went well."""

from __future__ import annotations

from statistics import median

from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.record import NO_CONNECTION, Ending, RequestRecord, Run

MEDIAN_LAG_S = 0.001
"""Requests may be sent so late, at the median."""
LATE_LAG_S = 0.010
LATE_SHARE_OF_TTFT = 0.1
"""One request in a hundred may be later than that only if it is less than this share of the median TTFT."""
BUSY_CPU_SHARE = 0.9
STALLED_SHARE = 0.02
LOST_SHARE = 0.01
"""If more requests than this did not complete, what is said of the others is not what clients saw."""


def generator_faults(run: Run, *, is_paced: bool) -> tuple[str, ...]:
    """Why the generator was the bottleneck, in words; empty if it was not.

    `is_paced` says that requests had times of their own. In a burst all are sent at once, and how long that takes is no
    lag; a closed loop has no times.
    """
    faults: list[str] = []
    if is_paced and (lags_s := [lag for sender in run.senders for lag in sender.send_lags_s]):
        faults += _lag_faults(lags_s, _median_ttft_s(run))
    for number, sender in enumerate(run.senders):
        name = "the sender" if len(run.senders) == 1 else f"sender {number}"
        if sender.cpu_share > BUSY_CPU_SHARE:
            faults.append(f"{name} was busy for {sender.cpu_share:.0%} of the time")
        if sender.stalled_share > STALLED_SHARE:
            longest_s = max(sender.loop_stalls_s, default=0.0)
            faults.append(
                f"{name}'s event loop was late for {sender.stalled_share:.1%} of the time, "
                f"for up to {longest_s * 1e3:.0f} ms"
            )
    return tuple(faults)


def _lag_faults(lags_s: list[float], ttft_s: float | None) -> list[str]:
    middle_s, late_s = median(lags_s), percentile(lags_s, 99)
    if middle_s > MEDIAN_LAG_S:
        return [f"half of the requests were sent more than {middle_s * 1e3:.2f} ms late"]
    allowed_s = max(LATE_LAG_S, 0.0 if ttft_s is None else LATE_SHARE_OF_TTFT * ttft_s)
    if late_s > allowed_s:
        return [f"one request in a hundred was sent more than {late_s * 1e3:.1f} ms late"]
    return []


def _median_ttft_s(run: Run) -> float | None:
    ttfts_s = [record.chunks[0].at_s - record.sent_at_s for record in run.requests if record.chunks]
    return median(ttfts_s) if ttfts_s else None


def load_warnings(run: Run) -> tuple[str, ...]:
    """What a reader must know of the requests before any latency, in words; empty if all but a few completed.

    Those that an interruption cut off do not count.
    """
    seen = [each for each in run.requests if not (run.was_interrupted and each.ending is Ending.CANCELLED)]
    lost = [each for each in seen if each.ending is not Ending.COMPLETED]
    if len(lost) <= LOST_SHARE * len(seen):
        return ()
    if len(lost) == len(seen):
        found = f"none of {len(seen)} requests completed"
    else:
        found = (
            f"{len(lost)} of {len(seen)} requests ({len(lost) / len(seen):.0%}) did not complete; all latencies are of "
            "the others, which may have been served better for it"
        )
    return (found, *_went_away(seen))


def _went_away(requests: list[RequestRecord]) -> list[str]:
    """Whether from some time on no request reached the server."""
    ordered = sorted(requests, key=lambda record: record.sent_at_s)
    reached = [number for number, record in enumerate(ordered) if not _is_unreached(record)]
    unreached = ordered[reached[-1] + 1 :] if reached else ordered
    if not unreached:
        return []
    if not reached:
        return [f"the server is not there: {unreached[-1].error}"]
    since_s = min(record.intended_at_s for record in unreached)
    return [
        f"the server went away: none of the last {len(unreached)} requests, due from {since_s:.1f} s on, reached it"
    ]


def _is_unreached(record: RequestRecord) -> bool:
    return record.status == 0 and record.error.startswith(NO_CONNECTION)
