"""Plain values and arrays on the wire, and what is neither."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl.errors import FrameError
from asyncrl.transport.values import pack_values, unpack_values

NUMERIC = arrays.boolean_dtypes() | arrays.integer_dtypes(endianness="<") | arrays.unsigned_integer_dtypes(endianness="<")
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
TIMES = (msgpack.Timestamp(1), msgpack.Timestamp(1, 1), msgpack.Timestamp(2**40, 1))
MANGLED = ("f4,(2", "O", "f4, f4", "V8", "U3", "(2,)f4", "M8[s]", "", "f4\0", "d" * 500, "{'names': []}", ">f4", "c8")


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_plain_values_arrive_as_they_were(value):
    assert unpack_values(pack_values(value)) == value


@given(arrays.arrays(NUMERIC | arrays.floating_dtypes(endianness="<", sizes=(16, 32, 64)), arrays.array_shapes(min_side=0)))
def test_numeric_arrays_arrive_as_they_were(array):
    arrived = unpack_values(pack_values({"a": array}))["a"]
    assert arrived.dtype == array.dtype
    np.testing.assert_array_equal(arrived, array)


@given(st.sampled_from(MANGLED) | st.text(max_size=12), st.lists(st.integers(-1, 9), max_size=3), st.binary(max_size=64))
def test_an_array_entry_is_an_array_or_refused_with_a_typed_error(dtype, shape, payload):
    entry = msgpack.ExtType(1, msgpack.packb([1, dtype, shape]))
    try:
        array = unpack_values([msgpack.packb({"a": entry}), payload])["a"]
    except FrameError:
        return
    assert array.tobytes() == payload


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_bytes_that_nobody_packed_are_a_value_or_a_typed_error(frames):
    try:
        unpack_values(frames)
    except FrameError:
        return


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array(["text"]), np.array([object()]), np.zeros(2, "c8")])
def test_what_is_no_plain_value_is_not_packed(value):
    with pytest.raises(TypeError):
        pack_values(value)


@pytest.mark.parametrize("time", TIMES, ids=str)
@pytest.mark.parametrize("around", [lambda it: it, lambda it: [{"a": [it]}], lambda it: {it: 1}], ids=["alone", "inside", "key"])
def test_a_timestamp_is_no_plain_value(time, around):
    with pytest.raises(FrameError):
        unpack_values([msgpack.packb(around(time))])
