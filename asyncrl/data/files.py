"""Rows from files: jsonl (one JSON object a line, blank lines skipped) and parquet (one row a row)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.data.rows import prompt_from_row
from asyncrl.errors import UserError
from asyncrl.protocols import Prompt


def read_prompts(path: Path, key: str) -> list[Prompt]:
    """Every row of the file, checked. `key` names the configuration key in messages. Raises UserError, with file and line."""
    if not path.is_file():
        raise UserError(f"{key} is {str(path)!r}, and there is no such file: give its path from the working directory")
    rows = _jsonl_rows(path, key) if path.suffix == ".jsonl" else _parquet_rows(path, key)
    prompts = [prompt_from_row(row, number, where) for number, (row, where) in enumerate(rows)]
    if not prompts:
        raise UserError(f"{key}: {path} has no row: a run needs at least one prompt")
    return prompts


def _jsonl_rows(path: Path, key: str) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as stream:
        for line_number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{key}: {path}:{line_number}"
            try:
                yield json.loads(line), where
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{where}: not a JSON object ({error}): a .jsonl file holds one object a line") from error


def _parquet_rows(path: Path, key: str) -> Iterator[tuple[Any, str]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    yield row, f"{key}: {path}, row {number}"
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} cannot be read as parquet after row {number}: {error}") from error
