"""Prompt sources: rows in an order that a cursor can resume.

`TableSource` holds all rows (a file, a list, a built-in task) and visits them epoch after epoch in `prompt_order`. `StreamSource`
calls a function for an iterator of rows, finite or endless, and takes them as they come.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from asyncrl.data.rows import prompt_from_row
from asyncrl.errors import UserError
from asyncrl.messages.order import PromptOrder, prompt_order
from asyncrl.protocols import Prompt, PromptCursor

KEPT_ROWS = 4096  # of a stream, for `row`; older ones are read again


class TableSource:
    """All rows in memory. In each of `epochs` epochs (None: without end) every row is given exactly once, and the same seed
    gives the same order on every machine."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None = None,
        cursor: PromptCursor | None = None,
        key: str = "data.train",
    ):
        if not prompts:
            raise UserError(f"{key} has no row: a run needs at least one prompt")
        if cursor is not None and (cursor.num_rows, cursor.seed, cursor.shuffle) != (len(prompts), seed, shuffle):
            raise UserError(
                f"{key} has {len(prompts)} rows (seed {seed}, shuffle {shuffle}), and the run to resume had {cursor.num_rows} "
                f"(seed {cursor.seed}, shuffle {cursor.shuffle}): resume with the same data, or start a new run"
            )
        self._prompts = tuple(prompts)
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._epoch, self._position = (cursor.epoch, cursor.position) if cursor else (0, 0)
        self._order = self._order_of(self._epoch)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All rows, in the order of the data."""
        return self._prompts

    @property
    def num_rows(self) -> int | None:
        return len(self._prompts)

    def next(self) -> tuple[int, Prompt] | None:
        if self._position == len(self._prompts):
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return self._epoch, prompt

    def row(self, row: int) -> Prompt:
        if not 0 <= row < len(self._prompts):
            raise KeyError(f"row {row} of {len(self._prompts)}")
        return self._prompts[row]

    def cursor(self) -> PromptCursor:
        return PromptCursor(self._epoch, self._position, len(self._prompts), self._seed, self._shuffle)

    def _order_of(self, epoch: int) -> PromptOrder:
        return prompt_order(self._seed, epoch, len(self._prompts), self._shuffle)


class StreamSource:
    """Rows that a function yields, in its own order (never shuffled: the length is not known beforehand).

    Each epoch calls `rows()` afresh, and so does a resumed run, which skips what was given; the function must therefore yield
    the same rows on every call. Row n is the n-th one yielded. `num_rows` is None until the first epoch has ended. Memory: the
    last `KEPT_ROWS` rows, also of those that a resumed run skips; to find an older one `row` calls the function again and replays
    it up to that row, which takes as long as the function takes to get there.
    """

    def __init__(
        self,
        rows: Callable[[], Iterable[Any]],
        *,
        seed: int,
        epochs: int | None = None,
        cursor: PromptCursor | None = None,
        key: str = "data.train",
    ):
        self._rows, self._key = rows, key
        self._seed, self._epochs = seed, epochs
        self._epoch, self._position = (cursor.epoch, cursor.position) if cursor else (0, 0)
        self._num_rows = cursor.num_rows if cursor else None
        self._kept: OrderedDict[int, Prompt] = OrderedDict()
        self._iterator = self._read_from(max(0, self._position - KEPT_ROWS))
        self._skips = min(self._position, KEPT_ROWS)  # rows that were given before, and are kept for `row`
        self._ahead = self._read() if cursor is None else None
        if cursor is None and self._ahead is None:
            raise UserError(f"{key} yields no row: a run needs at least one prompt")

    @property
    def num_rows(self) -> int | None:
        return self._num_rows

    def next(self) -> tuple[int, Prompt] | None:
        self._skip()
        prompt, self._ahead = self._ahead or self._read(), None
        if prompt is None:
            if self._num_rows is None:
                self._num_rows = self._position
            elif self._num_rows != self._position:
                raise self._changed(f"{self._position} rows in epoch {self._epoch} and {self._num_rows} before")
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._epoch, self._position = self._epoch + 1, 0
            self._iterator = self._read_from(0)
            prompt = self._read()
            if prompt is None:
                raise self._changed(f"no row in epoch {self._epoch}")
        if self._num_rows is not None and self._position >= self._num_rows:
            raise self._changed(f"more than the {self._num_rows} rows of the first epoch")
        self._position += 1
        self._keep(prompt)
        return self._epoch, prompt

    def row(self, row: int) -> Prompt:
        if row < 0 or row >= (self._num_rows if self._num_rows is not None else self._position):
            raise KeyError(f"row {row} was not given")
        self._skip()
        if row not in self._kept:
            found = next(self._read_from(row), None)
            if found is None:
                raise self._changed(f"no row {row} on a later call")
            return found
        return self._kept[row]

    def cursor(self) -> PromptCursor:
        return PromptCursor(self._epoch, self._position, self._num_rows, self._seed, shuffle=False)

    def _skip(self) -> None:
        """Pass over the rows that were given before this source was made, once. Raises UserError when they are not there."""
        while self._skips:
            self._skips -= 1
            prompt = self._read()
            if prompt is None:
                raise self._changed(f"fewer than the {self._position} rows that were taken from it before")
            self._keep(prompt)

    def _keep(self, prompt: Prompt) -> None:
        self._kept[prompt.row] = prompt
        self._kept.move_to_end(prompt.row)
        if len(self._kept) > KEPT_ROWS:
            self._kept.popitem(last=False)

    def _read(self) -> Prompt | None:
        return next(self._iterator, None)

    def _read_from(self, start: int) -> Iterator[Prompt]:
        try:
            given = iter(self._rows())
        except Exception as error:  # boundary: the user's function runs here, and may raise anything
            raise UserError(f"{self._key}: the function raised {type(error).__name__}: {error}; it must return rows") from error
        for number in itertools.count():
            try:
                row = next(given)
            except StopIteration:
                return
            except Exception as error:  # boundary: the user's generator runs here, and may raise anything
                raise UserError(f"{self._key}: yielding row {number} raised {type(error).__name__}: {error}") from error
            if number >= start:
                yield prompt_from_row(row, number, f"{self._key}: row {number}")

    def _changed(self, what: str) -> UserError:
        return UserError(f"{self._key}: the function yielded {what}: it must yield the same rows each time it is called")
