"""`python -m twinpool.bench.agreement --guidellm PATH --aiperf PATH`: does another load generator see the same?

Each of the given programs (`pip install guidellm`, `pip install aiperf`, each into an environment of its own) and
`twinpool bench`'s generator send the same load, one after the other, to scripted servers that answer the n-th request
with the same delays each time. Printed are the percentiles of both and of what the servers noted themselves; the status
is 1 if the generators differ by more than 2 %. With `--url` the server is a running one, whose own noise then is in the
differences too, and which notes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from twinpool.bench.agreement.figures import Figures, Settings, compared, header
from twinpool.bench.agreement.generators import GENERATORS
from twinpool.bench.scripted_answer import MODEL
from twinpool.bench.scripted_server import running, sent_by
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import DatasetSettings, RandomLengths, make_requests
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.settings import LoadSettings, ServerKind
from twinpool.config import require
from twinpool.errors import TwinpoolError

EXIT_AGREE, EXIT_DIFFER, EXIT_WRONG = 0, 1, 2
TOLERANCE = 0.02
_DELAYS = ("--ttft-ms", "200", "--itl-ms", "20", "--jitter", "0.4")


def run_ours(url: str, model: str, settings: Settings) -> Run:
    """The same load by this project's generator."""
    tokenizer = tokenizers.Tokenizer.from_file(str(settings.tokenizer_dir / "tokenizer.json"))
    lengths = RandomLengths(input_len=settings.input_tokens, output_len=settings.output_tokens)
    made = make_requests(DatasetSettings(random=lengths), tokenizer, settings.num_requests, settings.seed)
    requests = schedule(made, Pacing(Process.CONSTANT, settings.rate_per_s), settings.seed)
    return run_load(requests, LoadSettings(url, model, kind=ServerKind.VLLM, with_timelines=False))


def _server(url: str | None) -> contextlib.AbstractContextManager[str]:
    """The running one, or a scripted one, whose delays begin anew."""
    return running(*_DELAYS) if url is None else contextlib.nullcontext(url)


def _default_tokenizer() -> Path:
    done = subprocess.run([sys.executable, "-m", "twinpool", "fetch"], stdout=subprocess.PIPE, check=False)
    require(
        "--tokenizer",
        "default",
        done.returncode == 0,
        "a model's directory (the default one is not to be had)",
    )
    return Path(done.stdout.decode().strip().splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all, prints, judges. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 all figures agree within 2 %, 1 one does not, 2 something could not be run.",
    )
    for generator in GENERATORS:
        parser.add_argument(
            f"--{generator.name}",
            default=shutil.which(generator.name),
            metavar="PATH",
            help="the program (default: the one on the PATH, if there is one)",
        )
    parser.add_argument("--url", help="a running server (default: scripted ones)")
    parser.add_argument("--model", metavar="NAME", help="what --url serves")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a model's directory (the default model's)"
    )
    parser.add_argument("--num-requests", type=int, default=200, metavar="N", help="200")
    parser.add_argument("--rate", type=float, default=10.0, metavar="R", help="10 per second, at even gaps")
    parser.add_argument("--input-tokens", type=int, default=50, metavar="N", help="50")
    parser.add_argument("--output-tokens", type=int, default=40, metavar="N", help="40")
    args = parser.parse_args(argv)
    try:
        return _compare(args)
    except TwinpoolError as exc:
        print(exc, file=sys.stderr)
        return EXIT_WRONG


def _compare(args: argparse.Namespace) -> int:
    programs = {generator: vars(args)[generator.name] for generator in GENERATORS}
    given = {generator: program for generator, program in programs.items() if program is not None}
    names = " or ".join(f"--{generator.name}" for generator in GENERATORS)
    require(names, None, bool(given), "the path of an installed one")
    require("--model", args.model, (args.model is None) == (args.url is None), "the model's name, with --url")
    settings = Settings(
        num_requests=args.num_requests,
        rate_per_s=args.rate,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        tokenizer_dir=(args.tokenizer or _default_tokenizer()).expanduser(),
    )
    model = args.model or MODEL
    theirs: dict[str, Figures] = {}
    for generator, program in given.items():
        print(f"{generator.name}: {settings.num_requests} requests at {settings.rate_per_s:g}/s", flush=True)
        with tempfile.TemporaryDirectory() as folder, _server(args.url) as url:
            theirs[generator.name] = generator.run(program, url, model, settings, Path(folder))
    print("twinpool: the same", flush=True)
    with _server(args.url) as url:
        run = run_ours(url, model, settings)
        log = None if args.url is not None else list(sent_by(url).values())
    agree = True
    for name, figures in theirs.items():
        rows = compared(run, figures, log)
        print("\n".join([header(name), *map(str, rows)]))
        num_agreeing = sum(abs(row.difference) <= TOLERANCE for row in rows)
        print(f"{num_agreeing} of {len(rows)} figures agree within {TOLERANCE:.0%}")
        agree &= num_agreeing == len(rows)
    return EXIT_AGREE if agree else EXIT_DIFFER


if __name__ == "__main__":
    sys.exit(main())
