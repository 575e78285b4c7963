"""Files of one JSON object a line, which outlive the process that writes them: a crash may tear the last line, nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

Line = Mapping[str, Any]


def append_line(file: Path, line: Line) -> None:
    """In the file, and on the disk, when this returns. Raises OSError."""
    with file.open("ab") as lines:
        lines.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        lines.flush()
        os.fsync(lines.fileno())


def read_lines(file: Path) -> list[Line]:
    """Every whole line; none where there is no file. Raises OSError."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        return [line for raw in lines if (line := _line(raw)) is not None]


def keep_lines(file: Path, wanted: Callable[[Line], bool]) -> None:
    """Only the wanted lines are left; one that a crash tore goes too. Written aside, then renamed: whatever happens on the way,
    the file is the one before or the one after. Raises OSError."""
    if not file.exists():
        return
    aside = file.with_name(f".{file.name}.cut")
    with file.open("rb") as lines, aside.open("wb") as kept:
        kept.writelines(raw for raw in lines if (line := _line(raw)) is not None and wanted(line))
        kept.flush()
        os.fsync(kept.fileno())
    aside.replace(file)


def is_up_to(step: int) -> Callable[[Line], bool]:
    """Whether a line is of this step or an earlier one."""
    return lambda line: isinstance(line.get("step"), int) and line["step"] <= step


def _line(raw: bytes) -> Line | None:
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return line if raw.endswith(b"\n") and isinstance(line, dict) else None
