"""What the programs call broken, and how they say it."""

import json
import math
from dataclasses import replace

import pytest

from twinpool.bench.canary import _growth
from twinpool.bench.chaos import wrong_with
from twinpool.bench.client import End, Outcome
from twinpool.bench.overload import promises
from twinpool.bench.program import Check, Report
from twinpool.bench.server_under_test import Samples
from twinpool.bench.serving.slo import Slo

WANTED = Outcome(
    end=End.COMPLETE, token_ids=[5, 6, 7], text="abc", finish_reason="length", num_output_tokens=3
)
GIVEN_UP = "the request was lost 3 times and is not started again; the last: worker lost"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"token_ids": [5, 6, 8]}, "from number 2 on"),
        ({"token_ids": [5, 6, 6, 7]}, "from number 2 on"),
        ({"token_ids": [5, 6]}, "from number 2 on"),
        ({"text": "ab"}, "another text"),
        ({"finish_reason": "stop"}, "another text or finish reason"),
        ({"num_output_tokens": 4}, "usage says 4"),
        ({"end": End.BROKEN, "token_ids": [5]}, "ended broken after 1 tokens"),
        ({"end": End.HUNG}, "ended hung"),
        ({"end": End.FAILED, "token_ids": [5], "error": GIVEN_UP}, None),
        ({"end": End.REFUSED, "status": 500, "token_ids": [], "error": GIVEN_UP}, None),
        (
            {"end": End.FAILED, "token_ids": [5], "error": "not again: the server's retry budget is spent"},
            None,
        ),
        ({"end": End.FAILED, "token_ids": [6], "error": GIVEN_UP}, "after other tokens"),
        ({"end": End.FAILED, "token_ids": [5], "error": GIVEN_UP.replace("3", "2")}, "3 attempts"),
        ({"end": End.FAILED, "token_ids": [], "error": "something broke"}, "something broke"),
    ],
)
def test_chaos_knows_a_wrong_stream_from_a_right_one(changes: dict[str, object], fault: str | None) -> None:
    found = wrong_with(replace(WANTED, **changes), WANTED, max_attempts=3)
    assert found is None if fault is None else fault in (found or "")


def served(ttft_s: float = 0.5) -> Outcome:
    return Outcome(
        end=End.COMPLETE,
        first_output_at=ttft_s,
        ended_at=ttft_s,
        token_ids=[1],
        token_at=[ttft_s],
        status=200,
    )


def refused(after_s: float = 0.01, status: int = 429, retry_after_s: float | None = 1.0) -> Outcome:
    return Outcome(end=End.REFUSED, ended_at=after_s, status=status, retry_after_s=retry_after_s)


@pytest.mark.parametrize(
    ("outcomes", "broken"),
    [
        ([served(), refused()], ""),
        ([served()], "more load"),
        ([served(), served(3.0), refused()], "keeps the SLO"),
        ([refused()], "keeps the SLO"),
        ([served(), refused(0.06)], "under 50 ms"),
        ([served(), refused(status=503)], "429 with Retry-After"),
        ([served(), refused(retry_after_s=None)], "429 with Retry-After"),
    ],
)
def test_overload_names_the_promise_that_is_broken(outcomes: list[Outcome], broken: str) -> None:
    found = [check.promise for check in promises(outcomes, Slo(ttft_s=1.0, itl_p99_s=0.1)) if not check.holds]
    assert len(found) == bool(broken)
    assert broken in "".join(found)


def test_a_stream_that_hangs_breaks_an_overload() -> None:
    hung = Outcome(end=End.HUNG, ended_at=60.0)
    found = promises([*[served()] * 200, hung, refused()], Slo(ttft_s=1.0, itl_p99_s=0.1))
    assert [check.promise for check in found if not check.holds] == [
        "who is let in gets a complete answer; nobody hangs"
    ]


def test_growth_is_counted_from_when_the_process_has_settled() -> None:
    assert _growth([(0, 50.0), (1, 100.0), (2, 100.0), (3, 100.0), (4, 110.0)]) == pytest.approx(0.1)


def test_a_report_says_what_was_broken_to_people_and_to_programs() -> None:
    report = Report(
        "a title",
        {"rate": 1.5, "ends": {"complete": 3}, "nothing": {}, "unmeasured": math.nan},
        (Check("one", True, "yes"), Check("two", False, "no")),
    )
    assert not report.holds
    assert "  BROKEN  two: no" in report.text()
    assert report.text().endswith("1 of 2 promises broken")
    values = json.loads(report.to_json())
    assert values["holds"] is False
    assert values["figures"] == {"rate": 1.5, "ends": {"complete": 3}, "nothing": {}, "unmeasured": None}
    assert replace(report, checks=report.checks[:1]).text().endswith("all promises held")


METRICS = """\
# HELP twinpool_kv_blocks KV blocks
twinpool_kv_blocks{worker="decode-0",role="decode",state="free"} 90.0
twinpool_kv_blocks{worker="decode-0",role="decode",state="owned"} 4.0
twinpool_kv_blocks{worker="prefill-0",role="prefill",state="owned"} 3.0
twinpool_requests_live{state="decoding"} 1.0
twinpool_queue_requests 0.0
"""


def test_samples_are_summed_by_label_and_say_what_is_held() -> None:
    samples = Samples.parse(METRICS)
    assert samples.total("kv_blocks", role="decode") == 94
    assert samples.total("kv_blocks", state="quarantined") == 0
    assert samples.held() == {"requests_live": 1, "owned blocks": 7}


@pytest.mark.parametrize("name", ["chaos", "storm", "overload", "canary"])
def test_wrong_flags_end_a_program_with_status_2_before_any_server_starts(name: str) -> None:
    from importlib import import_module

    main = import_module(f"twinpool.bench.{name}").main
    for wrong in (["--seed", "x"], ["--nonsense"], ["--clients" if name != "chaos" else "--streams", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
    assert main(["--url", "ftp://nowhere"]) == 2
