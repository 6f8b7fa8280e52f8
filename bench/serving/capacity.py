"""How much load one sender process can put on a server, and how exactly it sees what comes.

`python -m twinpool.bench.serving.capacity` lets one sender, on a core of its own, ask a scripted server on another, at
each rate in turn. It prints how late requests were sent, how long after its sending each piece of output was seen (both
processes stamp with the same clock), and whether the generator would call that a result.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.bench.scripted_answer import MODEL
from twinpool.bench.scripted_server import Sent, running, sent_by
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.record import Ending, Run
from twinpool.bench.serving.settings import LoadSettings, ServerKind
from twinpool.bench.serving.verdict import generator_faults
from twinpool.bench.serving.workload import PlannedRequest

EXIT_GOOD, EXIT_TOO_LATE = 0, 1
WANTED_LAG_S = 0.001


@dataclass(frozen=True, slots=True)
class Reached:
    """One rate's figures. Times in seconds."""

    rate_per_s: float
    num_requests: int
    num_completed: int
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    seen_p50_s: float
    """From the server's sending of a piece to the client's stamp on it."""
    seen_p99_s: float
    cpu_share: float
    stalled_share: float
    faults: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether every request completed and the generator kept up."""
        return not self.faults and self.lag_p50_s < WANTED_LAG_S and self.num_completed == self.num_requests

    def row(self) -> str:
        """In one line, times in ms."""
        times = (self.lag_p50_s, self.lag_p99_s, self.lag_max_s, self.seen_p50_s, self.seen_p99_s)
        shown = "".join(f"{seconds * 1e3:>10.3f}" for seconds in times)
        judged = (
            "good" if self.is_good else "; ".join(self.faults) or "requests did not complete, or were late"
        )
        return (
            f"{self.rate_per_s:>10g}{self.num_completed:>7}{shown}"
            f"{self.cpu_share:>7.0%}{self.stalled_share:>9.1%}  {judged}"
        )


HEADER = (
    f"{'requests/s':>10}{'done':>7}{'lag p50':>10}{'p99':>10}{'max':>10}{'seen p50':>10}{'p99':>10}"
    f"{'CPU':>7}{'stalled':>9}  (ms)"
)


def measure(rate_per_s: float, num_tokens: int, seconds: float, cores: tuple[int, int]) -> Reached:
    """One rate: Poisson arrivals of streams of so many tokens, the server on the first core, the sender on the second.

    Raises SenderLost.
    """
    asked = [
        PlannedRequest(index=index, prompt="as usual", input_tokens=2, output_tokens=num_tokens)
        for index in range(round(rate_per_s * seconds))
    ]
    requests = schedule(asked, Pacing(Process.POISSON, rate_per_s), seed=1)
    with running("--core", str(cores[0])) as url:
        settings = LoadSettings(url, MODEL, kind=ServerKind.TWINPOOL, with_timelines=False, cores=(cores[1],))
        run = run_load(requests, settings)
        log = sent_by(url)
    return _reached(rate_per_s, run, log)


def _reached(rate_per_s: float, run: Run, log: dict[str, Sent]) -> Reached:
    (sender,) = run.senders
    lags_s, seen_s = sender.send_lags_s, _delays_s(run, log)
    return Reached(
        rate_per_s=rate_per_s,
        num_requests=len(run.requests),
        num_completed=sum(record.ending is Ending.COMPLETED for record in run.requests),
        lag_p50_s=percentile(lags_s, 50),
        lag_p99_s=percentile(lags_s, 99),
        lag_max_s=max(lags_s),
        seen_p50_s=percentile(seen_s, 50),
        seen_p99_s=percentile(seen_s, 99),
        cpu_share=sender.cpu_share,
        stalled_share=sender.stalled_share,
        faults=generator_faults(run, is_paced=True),
    )


def _delays_s(run: Run, log: dict[str, Sent]) -> list[float]:
    """Of each piece. The run's zero on the shared clock is the latest at which no request came before it was sent."""
    zero = min(log[record.request_id].received_at - record.sent_at_s for record in run.requests)
    return [
        chunk.at_s + zero - sent_at
        for record in run.requests
        for chunk, sent_at in zip(record.chunks, log[record.request_id].pieces_at, strict=False)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each rate. Returns 1 if one of them was too much."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 every rate was kept, 1 one was not, 2 a wrong flag, 130 Ctrl-C.",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[200.0], metavar="R", help="per second (200)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each stream (64)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="for each rate (15)")
    parser.add_argument(
        "--cores",
        type=int,
        nargs=2,
        metavar=("SERVER", "SENDER"),
        help="default: the first two that may be used",
    )
    args = parser.parse_args(argv)
    usable = sorted(os.sched_getaffinity(0))
    cores = tuple(args.cores or (usable[0], usable[1 % len(usable)]))
    print(f"one sender on core {cores[1]}, streams of {args.tokens} tokens, {args.seconds:g} s at each rate")
    print(HEADER)
    is_good = True
    for rate in args.rates:
        reached = measure(rate, args.tokens, args.seconds, (cores[0], cores[1]))
        print(reached.row(), flush=True)
        is_good = is_good and reached.is_good
    return EXIT_GOOD if is_good else EXIT_TOO_LATE


if __name__ == "__main__":
    sys.exit(main())
