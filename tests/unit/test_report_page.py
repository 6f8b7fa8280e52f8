"""The page: one file that loads nothing, says everything, and takes no text for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.made_up_runs import HOSTILE, made_up_report, made_up_run

from twinpool.bench.reports.markup import Markup, tag
from twinpool.bench.reports.measured import arm_of
from twinpool.bench.reports.model import ArmReport, OutputCheck, OutputDifference, Report, Table
from twinpool.bench.reports.page import page, write_report
from twinpool.bench.reports.timeline import timeline_data
from twinpool.errors import ConfigError

LOADING = {"src", "srcset", "href", "action", "data", "poster", "formaction", "xlink:href"}
VOID = {"meta", "link", "br", "hr"}


class Elements(HTMLParser):
    """Every element of a page with its attributes, its text, and whether all were closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._open[-1:] != ["style"]:
            self.words += data


def hostile(value: Any) -> Any:
    """The same values, with every text replaced by one that would run if it were markup, followed by the text."""
    match value:
        case str():
            return HOSTILE + value
        case list():
            return [hostile(each) for each in value]
        case dict():
            return {key: hostile(each) for key, each in value.items()}
        case _:
            return value


def hostile_report() -> Report:
    """A report whose every free text is hostile; times and what is one of few words stay."""
    report = made_up_report(num_requests=12, num_runs=1)
    arms = []
    for arm in report.arms:
        requests = tuple(
            msgspec.structs.replace(
                record,
                request_id=HOSTILE,
                group=HOSTILE,
                error=HOSTILE,
                output=HOSTILE,
                timeline=record.timeline
                and msgspec.structs.replace(
                    record.timeline,
                    stages=tuple(
                        msgspec.structs.replace(s, name=HOSTILE + s.name, worker=HOSTILE)
                        for s in record.timeline.stages
                    ),
                ),
            )
            for record in arm.runs[0].requests
        )
        run = msgspec.structs.replace(arm.runs[0], requests=requests, settings=hostile(arm.runs[0].settings))
        arms.append(
            msgspec.structs.replace(
                arm,
                name=HOSTILE + arm.name,
                description=HOSTILE,
                command=HOSTILE,
                settings={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
                warnings=(HOSTILE,),
                not_a_result=(HOSTILE,),
                runs=(run,),
            )
        )
    free = ("comparisons", "curves", "maps", "tables", "hardware", "settings")
    changed = {name: hostile_structs(getattr(report, name)) for name in free}
    check = OutputCheck(
        baseline=HOSTILE,
        other=HOSTILE,
        num_compared=2,
        num_different=1,
        differences=(
            OutputDifference(index=1, first_difference=3, baseline_output=HOSTILE, other_output=HOSTILE),
        ),
    )
    return msgspec.structs.replace(
        report,
        arms=tuple(arms),
        title=HOSTILE,
        created_at=HOSTILE,
        slo=HOSTILE,
        findings=(HOSTILE,),
        warnings=(HOSTILE,),
        commands=(HOSTILE,),
        output_checks=(check,),
        **changed,
    )


def hostile_structs(values: tuple[msgspec.Struct, ...]) -> tuple[msgspec.Struct, ...]:
    kept = {"unit", "better", "measure"}

    def changed(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            fields = {f: getattr(value, f) for f in value.__struct_fields__}
            return type(value)(**{n: v if n in kept else changed(v) for n, v in fields.items()})
        if isinstance(value, tuple):
            return tuple(changed(each) for each in value)
        return hostile(value)

    return tuple(changed(each) for each in values)


def test_no_text_of_a_report_is_taken_for_markup() -> None:
    plain = Elements(page(made_up_report(num_requests=12, num_runs=1)))
    attacked = Elements(page(hostile_report()))
    assert [attributes.get("type") for attributes, _ in attacked.scripts] == ["application/json", None]
    assert not [name for name, _ in attacked.found if name == "img"]
    assert {name for name, _ in attacked.found} <= {name for name, _ in plain.found}
    assert not [key for _, attributes in attacked.found for key in attributes if key.startswith("on")]
    assert attacked.words.count(HOSTILE) > 50, "every text is shown as it is"
    embedded = json.loads(attacked.scripts[0][1])
    assert embedded["arms"][0]["runs"][0]["requests"][0]["id"] == HOSTILE[:200]


def test_the_page_loads_nothing_and_allows_no_script_but_its_own() -> None:
    found = Elements(page(made_up_report()))
    loaded = [attributes[key] for _, attributes in found.found for key in attributes if key in LOADING]
    assert loaded == ["data:,"]
    policy = next(a["content"] for _, a in found.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    (script,) = [text for attributes, text in found.scripts if attributes.get("type") is None]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?:|url\(|@import", page(made_up_report()))


def test_the_page_has_every_part_that_the_report_has() -> None:
    found = Elements(page(made_up_report(), "report.json"))
    for words in (
        "1p1d 42 % lower than colocated-chunked-128 [38, 45]",
        "TTFT 500 ms, TPOT 50 ms",
        "Differences",
        "Distributions",
        "Goodput against request rate",
        "Where splitting wins, and where it loses",
        "tight TTFT, loose ITL",
        "Timeline",
        "Stages before the first token",
        "Three customers",
        "1,310 ms",
        "How requests ended",
        "twinpool serve --prefill 1 --decode 1",
        "a processor of two cores",
        "twinpool compare --arms colocated-chunked,1p1d",
        "report.json",
    ):
        assert words in found.words
    assert sum(name == "polyline" for name, _ in found.found) == 6, "two arms in three charts"


def test_percentiles_of_a_handful_are_marked_as_the_largest_value() -> None:
    """Of nine values p90 and above are the largest one; of nine requests the summary says so."""
    run = made_up_run()
    few = msgspec.structs.replace(run, requests=run.requests[:9])
    text = page(Report(title="t", created_at="", arms=(arm_of("a", [few]),)))
    words = Elements(text).words
    assert "= max" in words
    assert "The p99 of fewer than 100 values is simply the largest of them" in words


def test_runs_that_the_arms_do_not_hold_are_counted_too() -> None:
    report = Report(title="t", created_at="", arms=(), num_other_runs=7, num_other_requests=224)
    assert "0 arms · 7 runs · 224 requests" in Elements(page(report)).words


def test_a_single_run_makes_a_page_without_empty_parts() -> None:
    run = made_up_run(with_timelines=False)
    report = Report(
        title="one run", created_at="2026-01-02T03:04:05+00:00", arms=(ArmReport(name="a", runs=(run,)),)
    )
    found = Elements(page(report))
    headings = re.findall(r"<h2>(.*?)</h2>", page(report))
    assert headings == ["Distributions", "Timeline", "By length and group", "How requests ended"]
    assert "2 January 2026, 03:04 UTC · 1 arm · 1 run · 40 requests" in found.words


def test_a_page_without_requests_has_no_script() -> None:
    table = Table(title="a table", columns=("", "n"), rows=(("x", "1"),))
    report = Report(title="t", created_at="", arms=(), tables=(table,))
    assert Elements(page(report)).scripts == []


def test_stages_that_do_not_sum_to_the_clients_ttft_are_counted() -> None:
    report = made_up_report(num_requests=12, num_runs=1)
    run = report.arms[1].runs[0]
    record = next(each for each in run.requests if each.timeline is not None)
    assert record.timeline is not None
    short = msgspec.structs.replace(record.timeline, stages=record.timeline.stages[:2])
    requests = tuple(msgspec.structs.replace(r, timeline=short) if r is record else r for r in run.requests)
    arm = msgspec.structs.replace(report.arms[1], runs=(msgspec.structs.replace(run, requests=requests),))
    total = sum(r.timeline is not None and r.ending == "completed" for r in requests)
    words = Elements(page(msgspec.structs.replace(report, arms=(arm,)))).words
    assert (
        f"1p1d: the stages sum to the client's TTFT within 2 ms for {total - 1} of {total} requests." in words
    )


def test_tokens_that_came_together_are_told_beside_the_chart() -> None:
    report = made_up_report(num_requests=12, num_runs=1)
    run = report.arms[0].runs[0]
    pairs = tuple(
        msgspec.structs.replace(
            record,
            output_tokens=2 * record.output_tokens,
            chunks=tuple(msgspec.structs.replace(chunk, num_tokens=2) for chunk in record.chunks),
        )
        for record in run.requests
    )
    arm = msgspec.structs.replace(report.arms[0], runs=(msgspec.structs.replace(run, requests=pairs),))
    words = Elements(page(msgspec.structs.replace(report, arms=(arm,)))).words
    assert "of the gaps of colocated-chunked-128 are 0: tokens that came in one chunk" in words
    assert "gap between chunks" in words


def test_what_a_page_cannot_hold_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    report = made_up_report(num_requests=12, num_runs=2)
    monkeypatch.setattr("twinpool.bench.reports.timeline.MOST_REQUESTS", 40)
    monkeypatch.setattr("twinpool.bench.reports.timeline.MOST_CHUNKS", 1000)
    data = timeline_data(report.arms)
    assert (data["left_out"], data["without_tokens"]) == (1, 2)
    kept = {arm["name"]: [run["name"] for run in arm["runs"]] for arm in data["arms"]}
    assert kept == {"colocated-chunked-128": ["repetition 1", "repetition 2"], "1p1d": ["repetition 1"]}
    words = Elements(page(report)).words
    assert "1 repetition is left out" in words
    assert "2 repetitions have no marks of tokens" in words


def test_the_json_beside_the_page_holds_the_same(tmp_path: Path) -> None:
    report = made_up_report(num_requests=6, num_runs=1)
    written = write_report(tmp_path / "r.html", report)
    assert [path.name for path in written] == ["r.html", "r.json"]
    assert msgspec.json.decode(written[1].read_bytes(), type=Report) == report
    with pytest.raises(ConfigError, match="folder that exists"):
        write_report(tmp_path / "missing" / "r.html", report)


def test_markup_escapes_what_is_not_markup() -> None:
    made = tag("p", "<b>", Markup("<i></i>"), ["&", None], class_="a\"'", data_x=1.5, hidden=None)
    assert made == '<p class="a&quot;&#x27;" data-x="1.5">&lt;b&gt;<i></i>&amp;</p>'
