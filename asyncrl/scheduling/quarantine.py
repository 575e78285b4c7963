"""Quarantine: prompts that fail again and again are not generated any more. Pure.

A row counts its attempts that ended failed, one after the other; one that was scored (whatever the trainer made of it) begins the
count anew. At `after` failures the row is in quarantine, and each of its later attempts ends at once, with `reason`: so every
attempt that is dispatched has one end, and the run goes on without the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from asyncrl.protocols import End

QUARANTINED = "quarantined"
REASONS_KEPT = 8  # of one row, the newest


class Quarantine:
    """`after`: failures in a row, 0 for no quarantine. failures: counts of an earlier life. innocent: reasons of failed ends that
    say nothing of the prompt; neither does one whose prompt starts again."""

    def __init__(self, after: int, *, failures: Mapping[int, int], innocent: Collection[str] = ()):
        self._after, self._innocent = after, frozenset(innocent)
        self._failures = {row: count for row, count in failures.items() if after and count}
        self._reasons: dict[int, list[str]] = {}
        self._rows = {row for row, count in self._failures.items() if count >= after}

    @property
    def rows(self) -> frozenset[int]:
        """The rows in quarantine."""
        return frozenset(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, end: End) -> bool:
        """An attempt has ended. Whether its row is in quarantine because of this."""
        row = end.id.row
        if end.state != "failed":
            self._failures.pop(row, None)
            self._reasons.pop(row, None)
            self._rows.discard(row)
            return False
        if not self._after or end.reissue or end.reason in self._innocent or end.reason.startswith(f"{QUARANTINED}:"):
            return False
        self._failures[row] = self._failures.get(row, 0) + 1
        self._reasons[row] = [*self._reasons.get(row, []), end.reason][-REASONS_KEPT:]
        if self._failures[row] < self._after or row in self._rows:
            return False
        self._rows.add(row)
        return True

    def remember(self, row: int, reasons: Collection[str]) -> None:
        """Why a row failed in an earlier life, where that is known."""
        self._reasons.setdefault(row, list(reasons)[-REASONS_KEPT:])

    def reasons(self, row: int) -> list[str]:
        """Why it failed, as far as this life knows, oldest first."""
        return list(self._reasons.get(row, []))

    def reason(self, row: int) -> str | None:
        """Why an attempt of this row ends at once; None for a row that is not in quarantine."""
        if row not in self._rows:
            return None
        reasons = self._reasons.get(row)
        last = f", last: {reasons[-1]}" if reasons else ""
        return f"{QUARANTINED}: row {row} failed {self._failures[row]} times{last}"
