"""Figures of the updates: pause and transfer apart, over (server, version); a version counts once, whoever took it.

Every event is a line of `sync.jsonl` first, so that the figures are those of the whole run, however often its ParameterSync was
started again: {"event": "published" | "confirmed" | "adopted" | "unverified" | "refused" | "failed", "version": "1.7", …}.

`verified` is what comparisons said. A digest that differed, or that nobody asked for, makes it false for good. A server that made
a version live, or may have, and gave no digest (it was killed then, or too slow) takes no traffic until it has confirmed one:
`unanswered` counts that apart, and `verified` is false as long as it has confirmed nothing since.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from asyncrl.protocols.weights import PolicyVersion
from asyncrl.services.json_lines import keep_lines, read_lines
from asyncrl.weight_sync.channel import Unverified

log = logging.getLogger(__name__)

REMEMBERED = 1024  # newest versions: an older one is confirmed by nobody any more
SMALLEST = 1e-3  # of a cost that is told from the next


class SyncStats:
    """The first version of every incarnation (the one that verifies the servers at start) is left out of all counts but
    `verified` and `refused`: count = published versions that a server confirmed; skipped = published ones that none did and
    none will, because a newer one was confirmed. record: the file of the events, which is gone on with; None keeps none.

    Memory does not grow with the versions: of those past the newest REMEMBERED only numbers are kept, and costs by their size."""

    def __init__(self, record: Path | None = None) -> None:
        self._record = record
        self._first: dict[int, int] = {}
        self._is_confirmed: dict[PolicyVersion, bool] = {}  # of the newest REMEMBERED that were published or confirmed
        self._num_confirmed = 0
        self._num_skipped = 0  # of those before
        self._newest_published = PolicyVersion(0, 0)
        self._newest = PolicyVersion(0, 0)  # that a server confirmed, a first one included
        self._pauses_ms, self._transfers_ms = Spread(), Spread()
        self._num_bytes = 0
        self._num_wrong = self._num_unanswered = 0
        self._silent: set[str] = set()  # servers that left a comparison unanswered, and have confirmed nothing since
        self._latest: dict[str, float] = {}
        self._latest_of: dict[str, dict[str, float]] = {}
        self._refused_slices = 0
        self._failed_updates = 0
        if record is not None:
            keep_lines(record, lambda line: True)  # one that a crash tore would spoil the next
            for line in read_lines(record):
                self._count(line)

    def published(self, version: PolicyVersion) -> None:
        """Every rank has staged `version`."""
        self._note("published", version)

    def confirmed(self, version: PolicyVersion, **cost: float | int | str) -> None:
        """A server holds `version` live. cost: server, pause_ms, transfer_ms, bytes."""
        self._note("confirmed", version, **cost)

    def adopted(self, version: PolicyVersion, *, server: str, verified: bool) -> None:
        """A server was found to hold `version` live, which an earlier process of this service had brought there."""
        self._note("adopted", version, server=server)
        if not verified:
            self.unverified(version, server=server, reason="unasked")

    def unverified(self, version: PolicyVersion, *, server: str, reason: Unverified) -> None:
        """A server made a version live, or may have, whose digest was not found to be the publisher's."""
        self._note("unverified", version, server=server, reason=reason)

    def refused(self, version: PolicyVersion, *, server: str, slices: int) -> None:
        """So many slices arrived wrong, and are sent again."""
        self._note("refused", version, server=server, slices=slices)

    def failed(self, version: PolicyVersion, *, server: str, reason: str) -> None:
        """A try to bring `version` to a server ended without a confirmation."""
        self._note("failed", version, server=server, reason=reason)

    def latest(self) -> dict[str, float]:
        """Flat metrics of the last confirmation; empty before the first that counts."""
        return dict(self._latest)

    def latest_of(self, server: str) -> dict[str, float]:
        """What this server's last confirmation took: pause_ms, transfer_ms; empty before the first."""
        return dict(self._latest_of.get(server, {}))

    def summary(self) -> dict[str, Any]:
        return {
            "count": self._num_confirmed,
            "pause_ms": {
                "p50": self._pauses_ms.quantile(0.5),
                "p99": self._pauses_ms.quantile(0.99),
                "max": self._pauses_ms.quantile(1.0),
            },
            "transfer_ms": {"p50": self._transfers_ms.quantile(0.5), "p99": self._transfers_ms.quantile(0.99)},
            "bytes": self._num_bytes,
            "skipped": self._num_skipped + sum(not sure and v < self._newest for v, sure in self._is_confirmed.items()),
            "verified": bool(self._first) and not self._num_wrong and not self._silent,
            "unanswered": self._num_unanswered,
            "refused_slices": self._refused_slices,
            "failed_updates": self._failed_updates,
        }

    def _note(self, event: str, version: PolicyVersion, **more: float | int | str) -> None:
        line = {"event": event, "version": str(version), **more}
        if self._record is not None:
            try:
                with self._record.open("ab") as lines:
                    lines.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            except OSError as error:  # figures are no reason to end a run
                log.error("%s is not kept any more (%s): figures will be lost with this process", self._record, error)
                self._record = None
        self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        version = PolicyVersion.parse(line["version"])
        counts = self._first.get(version.incarnation) != version.version
        if line["event"] in ("confirmed", "adopted"):
            self._newest = max(self._newest, version)
            self._silent.discard(line["server"])
            if line["event"] == "confirmed":
                self._latest_of[line["server"]] = {cost: line[cost] for cost in ("pause_ms", "transfer_ms")}
        match line["event"]:
            case "published" if version.incarnation not in self._first:
                self._first[version.incarnation] = version.version
            case "published" if counts:
                self._newest_published = max(self._newest_published, version)
                self._count_version(version, confirmed=False)
            case "adopted" if counts:
                self._count_version(version, confirmed=True)
            case "confirmed" if counts:
                self._count_confirmation(version, line)
            case "unverified" if line.get("reason") == "unanswered":
                self._num_unanswered += 1
                self._silent.add(line["server"])
            case "unverified":
                self._num_wrong += 1
            case "refused":
                self._refused_slices += line["slices"]
            case "failed":
                self._failed_updates += 1

    def _count_confirmation(self, version: PolicyVersion, line: Mapping[str, Any]) -> None:
        self._count_version(version, confirmed=True)
        self._pauses_ms.add(line["pause_ms"])
        self._transfers_ms.add(line["transfer_ms"])
        self._num_bytes += line["bytes"]
        newest = max(self._newest_published, version)
        self._latest = {
            "sync/pause_ms": line["pause_ms"],
            "sync/transfer_ms": line["transfer_ms"],
            "sync/bytes": float(line["bytes"]),
            "sync/version_lag": float(newest.version - version.version),
        }

    def _count_version(self, version: PolicyVersion, *, confirmed: bool) -> None:
        before = self._is_confirmed.get(version, False)
        self._num_confirmed += confirmed and not before
        self._is_confirmed[version] = confirmed or before
        if len(self._is_confirmed) > REMEMBERED:
            self._num_skipped += not self._is_confirmed.pop(next(iter(self._is_confirmed)))


class Spread:
    """Any number of values, kept as how many there were of about the same size: neighbours differ by 1 %."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, float]] = {}  # by the value's logarithm: how many, and the largest

    def add(self, value: float) -> None:
        size = round(math.log(max(value, SMALLEST)) / math.log(1.01))
        number, largest = self._sizes.get(size, (0, value))
        self._sizes[size] = number + 1, max(largest, value)

    def quantile(self, share: float) -> float:
        """Nearest rank: the smallest value that `share` of all values do not exceed, or one up to 1 % larger, to a thousandth; 0
        for none."""
        left = math.ceil(share * sum(number for number, _ in self._sizes.values()))
        for _, (number, largest) in sorted(self._sizes.items()):
            left -= number
            if left <= 0:
                return round(largest, 3)
        return 0.0
