from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopStrings

few_letters = st.text("abc", max_size=12)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the first stop string that completes, reading character by character."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@settings(deadline=None)
@given(st.lists(few_letters, max_size=6), stop_lists)
def test_output_depends_on_the_text_alone_and_never_holds_a_stop_string(
    pushes: list[str], stops: list[str]
):
    stream = StopStrings(stops)
    shown, stopped = "", False
    for text in pushes:
        more, stopped = stream.push(text)
        shown += more
    shown += stream.flush()
    assert (shown, stopped) == by_definition("".join(pushes), stops)


@settings(deadline=None)
@given(few_letters, stop_lists)
def test_exactly_the_longest_beginning_of_a_stop_string_is_held(text: str, stops: list[str]):
    shown, stopped = StopStrings(stops).push(text)
    if not stopped:
        begun = [
            n for s in stops for n in range(1, len(s)) if n <= len(text) and text.endswith(s[:n])
        ]
        assert shown == text[: len(text) - max(begun, default=0)]


def test_held_text_is_released_when_it_turns_out_harmless():
    stream = StopStrings(("\nUser:",))
    assert stream.push("Hello\nUs") == ("Hello", False)
    assert stream.push("eful") == ("\nUseful", False)
    assert stream.flush() == ""


def test_after_a_stop_everything_is_swallowed():
    stream = StopStrings(("END",))
    assert stream.push("a E") == ("a ", False)
    assert stream.push("ND b") == ("", True)
    assert stream.push("c") == ("", True)
    assert stream.flush() == ""


def test_without_stop_strings_text_passes_untouched():
    assert StopStrings(()).push("anything") == ("anything", False)
