"""Stop strings are found in a stream exactly where a search of the whole text finds them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.engine.stop_strings import StopMatcher

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None, int | None]:
    """(shown, stop string, length of text at which it is complete): tries every prefix of `text`."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, None


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(LETTERS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


@given(pieces=pieces(), stops=STOPS)
def test_equals_the_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, seen, matched_at = "", 0, None
    for piece in pieces:
        shown += matcher.add(piece)
        seen += len(piece)
        if matcher.matched is not None and matched_at is None:
            matched_at = (seen - len(piece), seen)
    if matcher.matched is None:
        shown += matcher.finish()
    wanted_text, wanted_stop, wanted_end = naive("".join(pieces), stops)
    assert (shown, matcher.matched) == (wanted_text, wanted_stop)
    if wanted_end is not None:
        assert matched_at is not None
        assert matched_at[0] < wanted_end <= matched_at[1]


@given(pieces=pieces(), stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += matcher.add(piece)
        if matcher.matched is not None:
            return
        held = text.removeprefix(shown)
        assert text == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_match_nothing_is_shown() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.add(piece) for piece in ("one E", "N", "D two", "three")] == ["one ", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])
