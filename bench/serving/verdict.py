"""Whether a run measured the server, or the load generator itself."""

from __future__ import annotations

from statistics import median

from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.record import Run

MEDIAN_LAG_S = 0.001
"""Requests may be sent so late, at the median."""
LATE_LAG_S = 0.010
LATE_SHARE_OF_TTFT = 0.1
"""One request in a hundred may be later than that only if it is less than this share of the median TTFT."""
BUSY_CPU_SHARE = 0.9
STALLED_SHARE = 0.02


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
