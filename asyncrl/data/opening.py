"""From what `data.train` and `data.eval` say to a source of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.functions import load_function, names_function
from asyncrl.config.paths import DATA_SUFFIXES
from asyncrl.data.builtin import BUILTIN_PREFIX, builtin_rows
from asyncrl.data.files import read_prompts
from asyncrl.data.rows import prompt_from_row
from asyncrl.data.sources import StreamSource, TableSource
from asyncrl.errors import UserError
from asyncrl.protocols import Prompt, PromptCursor, PromptSource

Data = str | Callable[[], Iterable[Any]] | Sequence[Any]
"""A path, a built-in, a function's name; or, in Python, the function itself or a list of rows."""


def open_prompts(
    data: Data,
    *,
    seed: int,
    shuffle: bool = True,
    epochs: int | None = None,
    cursor: PromptCursor | None = None,
    key: str = "data.train",
) -> PromptSource:
    """The training prompts. `cursor`: where a resumed run stands.

    A function that returns a list or tuple is a table like a file; one that returns any other iterable is a stream, which
    keeps its own order. Raises UserError: missing file, bad row (with file and line), no row, a function that cannot be loaded.
    """
    prompts = _table(data, key, split="train")
    if prompts is not None:
        return TableSource(prompts, seed=seed, shuffle=shuffle, epochs=epochs, cursor=cursor, key=key)
    return StreamSource(_function(data, key), seed=seed, epochs=epochs, cursor=cursor, key=key)


def open_eval_prompts(data: Data, *, samples: int, key: str = "data.eval") -> list[Prompt]:
    """The held-out prompts, at most `samples` of them, for an evaluation to take in turn. Raises UserError as `open_prompts`."""
    prompts = _table(data, key, split="eval")
    if prompts is None:
        stream = StreamSource(_function(data, key), seed=0, epochs=1, key=key)
        drawn = itertools.islice(iter(stream.next, None), samples)
        prompts = [prompt for _, prompt in drawn]
    if not prompts:
        raise UserError(f"{key} has no row: give held-out prompts, or set {key} to null")
    return prompts[:samples]


def _table(data: Data, key: str, split: Literal["train", "eval"]) -> list[Prompt] | None:
    """All rows, where their number is known beforehand; None for a stream."""
    rows: Any = data
    if isinstance(data, str):
        if data.startswith(BUILTIN_PREFIX):
            rows = builtin_rows(data, split, key)
        elif Path(data).suffix in DATA_SUFFIXES:
            return read_prompts(Path(data), key)
        elif not names_function(data):
            raise UserError(
                f"{key} is {data!r}: give a {' or '.join(DATA_SUFFIXES)} file, a built-in such as {BUILTIN_PREFIX}arithmetic, "
                "or a function as pkg.mod:fn or path/file.py:fn"
            )
    if isinstance(rows, str) or callable(rows):
        try:
            rows = _function(data, key)()
        except UserError:
            raise
        except Exception as error:  # boundary: the user's function runs here, and may raise anything
            raise UserError(f"{key}: the function raised {type(error).__name__}: {error}; it must return rows") from error
    if not isinstance(rows, list | tuple):
        return None
    return [prompt_from_row(row, number, f"{key}: row {number}") for number, row in enumerate(rows)]


def _function(data: Data, key: str) -> Callable[[], Iterable[Any]]:
    if isinstance(data, str):
        return load_function(data, key)
    assert callable(data), data
    return data
