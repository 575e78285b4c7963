"""Sources: every row once per epoch, in an order that a cursor resumes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import StreamSource, TableSource, prompt_from_row
from asyncrl.data.sources import KEPT_ROWS
from asyncrl.errors import UserError
from asyncrl.messages.order import prompt_order


def table(num_rows, **options):
    prompts = [prompt_from_row(f"row {row}", row, "here") for row in range(num_rows)]
    return TableSource(prompts, **{"seed": 0, "shuffle": True, **options})


def draw(source, count):
    return [(epoch, prompt.row) for epoch, prompt in itertools.islice(iter(source.next, None), count)]


def counting(limit=None):
    return lambda: ({"prompt": f"row {number}"} for number in (itertools.count() if limit is None else range(limit)))


@given(num_rows=st.integers(1, 40), epochs=st.integers(1, 3), shuffle=st.booleans())
def test_every_row_is_given_once_per_epoch(num_rows, epochs, shuffle):
    source = table(num_rows, epochs=epochs, shuffle=shuffle)
    drawn = draw(source, 10_000)
    assert sorted(drawn) == [(epoch, row) for epoch in range(epochs) for row in range(num_rows)]
    assert source.next() is None


def test_the_order_is_the_one_that_the_audit_knows():
    drawn = draw(table(10, seed=7), 20)
    assert drawn == [(epoch, row) for epoch in (0, 1) for row in prompt_order(7, epoch, 10, True)]


def test_without_shuffling_the_order_is_the_files():
    assert draw(table(4, shuffle=False), 5) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


@given(num_rows=st.integers(1, 20), before=st.integers(0, 50))
def test_a_cursor_resumes_where_the_source_stood(num_rows, before):
    source = table(num_rows)
    draw(source, before)
    resumed = table(num_rows, cursor=source.cursor())
    assert draw(resumed, 30) == draw(source, 30)


def test_other_data_than_before_is_refused_on_resume():
    cursor = table(10).cursor()
    with pytest.raises(UserError, match=r"11 rows .* had 10"):
        table(11, cursor=cursor)


def test_a_row_is_found_by_its_number():
    assert table(5).row(3).prompt == "row 3"
    with pytest.raises(KeyError):
        table(5).row(5)


def test_an_endless_stream_goes_on():
    source = StreamSource(counting(), seed=0)
    assert draw(source, 1000) == [(0, row) for row in range(1000)]
    assert source.num_rows is None
    assert source.cursor().num_rows is None
    assert not source.cursor().shuffle


def test_a_finite_stream_is_called_again_for_every_epoch():
    source = StreamSource(counting(3), seed=0, epochs=2)
    assert draw(source, 100) == [(epoch, row) for epoch in (0, 1) for row in range(3)]
    assert source.num_rows == 3


def test_a_stream_resumes_by_skipping_what_was_given():
    source = StreamSource(counting(), seed=0)
    draw(source, 7)
    assert draw(StreamSource(counting(), seed=0, cursor=source.cursor()), 2) == [(0, 7), (0, 8)]


@pytest.mark.parametrize("epochs_given", [0, 1])
def test_a_resumed_source_finds_every_row_that_was_given_before(epochs_given):
    given = 5 * epochs_given + 3
    for make in (lambda cursor: StreamSource(counting(5), seed=0, cursor=cursor), lambda cursor: table(5, cursor=cursor)):
        source = make(None)
        rows = [row for _, row in draw(source, given)]
        resumed = make(source.cursor())
        assert {row: resumed.row(row).prompt for row in rows} == {row: f"row {row}" for row in rows}
        assert draw(resumed, 7) == draw(source, 7)


def test_a_resumed_stream_keeps_the_rows_that_it_skips():
    calls = []

    def rows():
        calls.append(None)
        return counting()()

    source = StreamSource(rows, seed=0)
    draw(source, KEPT_ROWS + 10)
    resumed = StreamSource(rows, seed=0, cursor=source.cursor())
    assert [resumed.row(row).row for row in (10, 500, KEPT_ROWS + 9)] == [10, 500, KEPT_ROWS + 9]
    assert len(calls) == 2
    assert resumed.row(9).row == 9  # older: replayed
    assert len(calls) == 3


def test_a_resumed_stream_that_is_shorter_now_is_refused():
    source = StreamSource(counting(5), seed=0, epochs=3)
    draw(source, 7)
    with pytest.raises(UserError, match="the same rows each time"):
        draw(StreamSource(counting(4), seed=0, epochs=3, cursor=source.cursor()), 100)


def test_a_streams_memory_is_bounded_and_old_rows_are_read_again():
    source = StreamSource(counting(), seed=0)
    draw(source, KEPT_ROWS + 10)
    assert len(source._kept) == KEPT_ROWS
    assert source.row(2).prompt == "row 2"
    with pytest.raises(KeyError):
        source.row(KEPT_ROWS + 10)


def test_a_stream_of_nothing_is_refused_at_once():
    with pytest.raises(UserError, match="yields no row"):
        StreamSource(counting(0), seed=0)


def test_a_stream_that_raises_names_the_row():
    def rows():
        yield {"prompt": "fine"}
        raise RuntimeError("lost the file")

    source = StreamSource(rows, seed=0)
    assert draw(source, 1) == [(0, 0)]
    with pytest.raises(UserError, match="row 1 raised RuntimeError: lost the file"):
        source.next()
