"""What users give becomes what messages carry, or is refused by name."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.codec import from_payload, to_payload
from asyncrl.messages.plain import plain
from tests.messages.samples import trajectory


class Colour(enum.StrEnum):
    RED = "red"


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.decimals(allow_nan=False)
)
foreign = st.sampled_from(
    [np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True), np.str_("a"), np.arange(3), Colour.RED, {1}, object(), 2**64]
)
values = st.recursive(
    scalars | foreign,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_what_becomes_plain_travels_unchanged(value):
    try:
        found = plain(value)
    except TypeError:
        return
    assert from_payload(to_payload(dataclasses.replace(trajectory(), ground_truth=found))).ground_truth == found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.str_("a"), "a"),
        (Colour.RED, "red"),
        (np.arange(2), [0, 1]),
        ((1, (2,)), [1, [2]]),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (decimal.Decimal("0.5"), 0.5),
        ({1: np.int64(2)}, {"1": 2}),
    ],
)
def test_values_of_other_types_become_the_types_that_travel(value, expected):
    found = plain(value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": b"x"}}, r"'a\.b' holds a bytes"),
        ([{1}], "holds a set"),
        ({"n": 2**64}, "'n' holds a whole number of more than 64 bits"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(value, words):
    with pytest.raises(TypeError, match=words):
        plain(value)


def test_a_value_inside_itself_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(TypeError, match="more than 64 deep"):
        plain(value)
