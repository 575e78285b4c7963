"""Reading batches.jsonl, the trainer's own word on what trained: one object per step, {"step", "version", "groups", …}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from asyncrl.ledger.rows import Finding
from asyncrl.messages import GroupId

FILE_NAME = "batches.jsonl"


@dataclass(frozen=True)
class BatchLine:
    step: int
    version: int
    groups: tuple[GroupId, ...]


def read_batches(run_dir: Path) -> tuple[list[BatchLine], list[Finding], list[str]]:
    """The lines, what is wrong with others, and notes. A last line without its newline was being written: it does not count."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return [], [], []
    *whole, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[BatchLine] = []
    findings: list[Finding] = []
    for number, text in enumerate(whole, 1):
        line = _parse(text)
        if line is None:
            findings.append(Finding(f"{FILE_NAME} line {number}", f"is no batch: {text[:80]!r}"))
        else:
            lines.append(line)
    return lines, findings, [f"{FILE_NAME} ends in the middle of a line: left out"] if rest else []


def _parse(text: str) -> BatchLine | None:
    try:
        match json.loads(text):
            case {"step": int(step), "version": int(version), "groups": [*groups]}:
                return BatchLine(step, version, tuple(GroupId.parse(id) for id in groups))
    except (ValueError, TypeError, AttributeError):
        return None
    return None
