from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.orchestrator.stop_strings import StopStringFilter


def run(stop: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    stop_filter = StopStringFilter(stop)
    shown = [stop_filter.push(piece) for piece in pieces]
    return "".join([*shown, stop_filter.finish()]), stop_filter.matched is not None


def oracle(stop: Sequence[str], text: str) -> tuple[str, bool]:
    found = [text.find(one) for one in stop if one in text]
    return (text[: min(found)], True) if found else (text, False)


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


TEXT = st.text(alphabet="ab.", max_size=24)
STOP = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), max_size=4)


@given(stop=STOP, text=TEXT, places=st.lists(st.integers(0, 24), max_size=24))
@settings(max_examples=200)
def test_the_earliest_match_wins_whatever_the_chunking(
    stop: list[str], text: str, places: list[int]
) -> None:
    assert run(stop, cut(text, places)) == oracle(stop, text)


@given(stop=STOP, text=TEXT)
@settings(max_examples=100)
def test_nothing_of_a_stop_string_is_shown_before_the_end(stop: list[str], text: str) -> None:
    stop_filter = StopStringFilter(stop)
    expected, _ = oracle(stop, text)
    shown = ""
    for char in text:
        shown += stop_filter.push(char)
        assert expected.startswith(shown)


def test_only_a_possible_beginning_is_held_back() -> None:
    stop_filter = StopStringFilter(["END"])
    assert stop_filter.push("to be EN") == "to be "
    assert stop_filter.push("TER") == "ENTER"
    assert stop_filter.push(" E") == " "
    assert stop_filter.finish() == "E"
    assert stop_filter.matched is None


def test_the_match_names_the_stop_string_and_ends_the_text() -> None:
    stop_filter = StopStringFilter(["\n\n", "User:"])
    assert stop_filter.push("Yes. Us") == "Yes. "
    assert stop_filter.push("er: no") == ""
    assert stop_filter.matched == "User:"
    assert stop_filter.push("more") == ""
    assert stop_filter.finish() == ""


@pytest.mark.parametrize(
    ("text", "shown", "matched"),
    [("abcd", "", "abcd"), ("abce", "a", "bc"), ("abc", "a", "bc")],
)
def test_a_match_waits_for_one_that_began_before_it(text: str, shown: str, matched: str) -> None:
    stop_filter = StopStringFilter(["abcd", "bc"])
    output = "".join(stop_filter.push(char) for char in text) + stop_filter.finish()
    assert (output, stop_filter.matched) == (shown, matched)


def test_without_stop_strings_everything_passes() -> None:
    stop_filter = StopStringFilter([])
    assert stop_filter.push("any text") == "any text"
    assert stop_filter.finish() == ""
