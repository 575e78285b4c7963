"""Figures of the updates: pause and transfer apart, over (server, version); a version counts once, whoever took it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncrl.protocols.weights import PolicyVersion


class SyncStats:
    """The first version of every incarnation (the one that verifies the servers at start) is left out of all counts but
    `verified` and `refused`: count = published versions that a server confirmed; skipped = published ones that none did and
    none will, because a newer one was confirmed."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._published: set[PolicyVersion] = set()
        self._confirmed: set[PolicyVersion] = set()
        self._pauses_ms: list[float] = []
        self._transfers_ms: list[float] = []
        self._num_bytes = 0
        self._unverified = 0
        self._latest: dict[str, float] = {}
        self.refused_slices = 0
        self.failed_updates = 0

    def published(self, version: PolicyVersion) -> None:
        self._first.setdefault(version.incarnation, version.version)
        if self._counts(version):
            self._published.add(version)

    def confirmed(self, version: PolicyVersion, *, pause_seconds: float, transfer_seconds: float, num_bytes: int) -> None:
        """A server holds `version` live."""
        if not self._counts(version):
            return
        self._confirmed.add(version)
        self._pauses_ms.append(pause_seconds * 1e3)
        self._transfers_ms.append(transfer_seconds * 1e3)
        self._num_bytes += num_bytes
        newest = max(self._published, default=version)
        self._latest = {
            "sync/pause_ms": pause_seconds * 1e3,
            "sync/transfer_ms": transfer_seconds * 1e3,
            "sync/bytes": float(num_bytes),
            "sync/version_lag": float(newest.version - version.version),
        }

    def adopted(self, version: PolicyVersion, *, verified: bool) -> None:
        """A server was found to hold `version` live, which an earlier process of this service had brought there."""
        if self._counts(version):
            self._confirmed.add(version)
        if not verified:
            self.unverified()

    def unverified(self) -> None:
        """A server made a version live, or may have, whose digest was not found to be the publisher's: `verified` is false from
        now on."""
        self._unverified += 1

    def latest(self) -> dict[str, float]:
        """Flat metrics of the last confirmation; empty before the first that counts."""
        return dict(self._latest)

    def summary(self) -> dict[str, Any]:
        newest = max(self._confirmed, default=PolicyVersion(0, 0))
        return {
            "count": len(self._confirmed),
            "pause_ms": {
                "p50": quantile(self._pauses_ms, 0.5),
                "p99": quantile(self._pauses_ms, 0.99),
                "max": quantile(self._pauses_ms, 1.0),
            },
            "transfer_ms": {"p50": quantile(self._transfers_ms, 0.5), "p99": quantile(self._transfers_ms, 0.99)},
            "bytes": self._num_bytes,
            "skipped": sum(1 for version in self._published - self._confirmed if version < newest),
            "verified": bool(self._first) and self._unverified == 0,
            "refused_slices": self.refused_slices,
            "failed_updates": self.failed_updates,
        }

    def _counts(self, version: PolicyVersion) -> bool:
        return self._first.get(version.incarnation) != version.version


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that `share` of all values do not exceed, to a thousandth; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)
