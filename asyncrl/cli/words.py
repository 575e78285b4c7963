"""Values as text: tables, durations, sizes."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


KEPT = "\n\t\u200c\u200d"


def visible(text: str) -> str:
    """Text that a model wrote, safe to print: control characters (an escape can repaint the terminal) and half characters become
    their Python escapes; line breaks, tabs and joiners stay."""
    return "".join(
        character if character in KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs") else ascii(character)[1:-1]
        for character in text
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns as wide as their widest cell, whatever the terminal: it can be piped and searched."""
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in ((*head,), *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(lines)


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 90:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(value: float | None) -> str:
    if value is None:
        return "?"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def count(value: float | None) -> str:
    """1234567 as 1,234,567."""
    return "?" if value is None else f"{value:,.0f}"


def number(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"


def at(values: Mapping[str, Any], *path: str) -> Any:
    """`values[path[0]][path[1]]…`, or None where a part is missing."""
    here: Any = values
    for part in path:
        here = here.get(part) if isinstance(here, Mapping) else None
    return here
