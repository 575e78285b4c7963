"""Values as text."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cli.words import visible


def test_an_escape_that_a_model_wrote_does_not_reach_the_terminal() -> None:
    assert visible("a\x1b[2Jb\r\u202e\ud800\n\tü字🙂\u200d") == "a\\x1b[2Jb\\r\\u202e\\ud800\n\tü字🙂\u200d"


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_what_is_visible_can_be_written_and_holds_no_control(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert not {character for character in shown if unicodedata.category(character) == "Cc"} - {"\n", "\t"}
