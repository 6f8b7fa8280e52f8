"""What is compared: ways to lay one model out on the same cores, or any running server.

Arms that we start get the same hardware: all cores of this process, the same model, type and kernels, and KV memory for
the same number of tokens in all. A layout of several workers divides cores and KV evenly among them, as `twinpool
serve` does by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from twinpool.config import require

COLOCATED_WHOLE, COLOCATED_CHUNKED, HYBRID = "colocated-whole", "colocated-chunked", "hybrid"
_SPLIT = re.compile(r"(\d+)p(\d+)d(-hybrid)?")
_COLOCATED = re.compile(r"(?:(\d+)x)?colocated-(whole|chunked)(?:-(\d+))?")
_NAME = re.compile(r"[\w.+-]+")
"""Of a log file and in request ids."""
_ALLOWED = (
    "colocated-whole, colocated-chunked (tuned), colocated-chunked-TOKENS, KxCOLOCATED for K workers, xPyD like 1p1d, "
    "xPyD-hybrid, NAME=URL of a running server, or NAME=ARGS as `twinpool serve` takes them"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One layout. `url` is that of a server which runs already, or empty; else `serve` starts one.

    `is_tuned` says that its token budget is to be found first, so that the baseline is as good as it can be here.
    """

    name: str
    serve: tuple[str, ...] = ()
    url: str = ""
    num_workers: int = 1
    is_tuned: bool = False

    def with_token_budget(self, tokens: int) -> Arm:
        """The arm with its chunk size set: no longer one to tune."""
        return replace(
            self,
            name=f"{self.name}-{tokens}",
            serve=(*self.serve, "--token-budget", str(tokens)),
            is_tuned=False,
        )

    def arguments(self, common: Sequence[str], kv_tokens: int, block_size: int) -> list[str]:
        """What follows `twinpool serve`: the arm's own flags, those common to all arms, and its share of the KV."""
        num_blocks = kv_tokens // block_size // self.num_workers
        return [*common, *self.serve, "--block-size", str(block_size), "--num-blocks", str(num_blocks)]


def parse_arm(text: str, max_model_len: int) -> Arm:
    """The arm that `text` names. `max_model_len` is the chunk of an arm that computes prompts whole.

    Raises:
        ConfigError: it names none.
    """
    name, separator, rest = text.partition("=")
    if separator:
        allowed = "a NAME of letters, digits and . _ + - before the ="
        require("--arms", text, _NAME.fullmatch(name) is not None, allowed)
    if separator and rest.startswith(("http://", "https://")):
        require("--arms", text, bool(urlsplit(rest).hostname), "NAME=http://HOST:PORT")
        return Arm(name, url=rest.rstrip("/"))
    if separator:
        require("--arms", text, rest.strip().startswith("--"), "NAME=--FLAGS of twinpool serve")
        flags = rest.split()
        return Arm(name, tuple(flags), num_workers=_num_workers(flags))
    lower = text.lower()
    if lower == HYBRID:
        lower = "1p1d-hybrid"
    if match := _SPLIT.fullmatch(lower):
        prefill, decode = int(match[1]), int(match[2])
        require("--arms", text, prefill > 0 and decode > 0, "at least one worker in each pool")
        serve = ("--prefill", match[1], "--decode", match[2], *(["--hybrid"] if match[3] else []))
        return Arm(f"{prefill}P{decode}D{match[3] or ''}", serve, num_workers=prefill + decode)
    match = _COLOCATED.fullmatch(lower)
    require("--arms", text, match is not None, _ALLOWED)
    assert match is not None, "required above"
    count, kind, tokens = int(match[1] or 1), match[2], match[3]
    require("--arms", text, count > 0 and not (kind == "whole" and tokens), _ALLOWED)
    serve = ("--colocated", str(count))
    if kind == "whole":
        return Arm(lower, (*serve, "--token-budget", str(max_model_len)), num_workers=count)
    if tokens:
        return Arm(lower, (*serve, "--token-budget", tokens), num_workers=count)
    return Arm(lower, serve, num_workers=count, is_tuned=True)


def parse_arms(text: str, max_model_len: int) -> list[Arm]:
    """Arms separated by commas, at least two, each name once. The first is what the others are compared with.

    Raises:
        ConfigError: fewer, the same name twice, or what `parse_arm` refuses.
    """
    arms = [parse_arm(part.strip(), max_model_len) for part in text.split(",") if part.strip()]
    require("--arms", text, len(arms) >= 2, "two or more, the first of which is the baseline")
    names = [arm.name for arm in arms]
    require("--arms", text, len(set(names)) == len(names), "arms of different names")
    return arms


def _num_workers(flags: Sequence[str]) -> int:
    """Of a server with these flags: its colocated workers, or those of both pools (default one each)."""
    counts = {"--colocated": 0, "--prefill": 1, "--decode": 1}
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        if flag in counts:
            require("--arms", " ".join(flags), value.isdigit(), f"a number after {flag}")
            counts[flag] = int(value)
    return counts["--colocated"] or counts["--prefill"] + counts["--decode"]
