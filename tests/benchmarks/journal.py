"""Where the queue's payloads lie best: append-only segment files, or blobs in the ledger's SQLite file.

Both stores do what a broker's wake-up does: accept a batch (payloads, ids) and settle as many of the oldest, in one durable step.
Samples of 8 KB come 32 to a step, groups of 5 MB alone. Each figure is the best of several rounds, the stores taken in turn.
`segments` is what the queue uses. The processor time of `process` decides, which a noisy disk does not change; wall-clock rates
stand beside it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder holds names of standard modules: it must leave the path before all imports

import json
import os
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.ledger.store import LedgerWriter
from asyncrl.transport.journal import SegmentJournal
from asyncrl.transport.journal.segments import Segments
from asyncrl.transport.records import Incoming

ROUNDS = 3
SHAPES = {"8KB": (8192, 32, 256, 8_000), "5MB": (5_000_000, 1, 16, 120)}  # bytes, to a step, unsettled, messages


class SegmentStore:
    """The journal, with its rows in the ledger's file."""

    def __init__(self, folder: Path, *, power: bool):
        self._writer = LedgerWriter(folder / "ledger.sqlite", power=power)
        self._journal = SegmentJournal(Segments(folder / "journal", power=power), self._writer.journal)

    def step(self, batch: list[Incoming], settled: list[int]) -> list[int]:
        tickets = list(self._journal.append("rollouts", batch))
        self._journal.settle(settled)
        self._journal.write()
        self._writer.flush()
        self._journal.written()
        return tickets

    def close(self) -> None:
        self._journal.close()
        self._writer.close()


class BlobStore:
    """One table with the payloads in it."""

    def __init__(self, folder: Path, *, power: bool):
        self._file = sqlite3.connect(folder / "blobs.sqlite", isolation_level=None)
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute(f"PRAGMA synchronous = {'FULL' if power else 'NORMAL'}")
        self._file.execute("CREATE TABLE journal (ticket INTEGER PRIMARY KEY, topic TEXT, message TEXT, grp TEXT, payload BLOB)")
        self._next = 1

    def step(self, batch: list[Incoming], settled: list[int]) -> list[int]:
        tickets = list(range(self._next, self._next + len(batch)))
        self._next += len(batch)
        rows = [(ticket, "rollouts", *message) for ticket, message in zip(tickets, batch, strict=True)]
        self._file.execute("BEGIN IMMEDIATE")
        self._file.executemany("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", rows)
        self._file.executemany("DELETE FROM journal WHERE ticket = ?", [(ticket,) for ticket in settled])
        self._file.execute("COMMIT")
        return tickets

    def close(self) -> None:
        self._file.close()


def rate(make: Callable[..., SegmentStore | BlobStore], shape: str, *, power: bool) -> tuple[float, float]:
    """Messages per second of wall time, and CPU microseconds a message."""
    size, to_a_step, unsettled, count = SHAPES[shape]
    payload = os.urandom(size)
    batches = [
        [Incoming(f"0/{row}/0/0", f"0/{row}/0", payload) for row in range(start, start + to_a_step)]
        for start in range(0, count, to_a_step)
    ]
    with tempfile.TemporaryDirectory(prefix="asyncrl-journal-") as folder:
        store = make(Path(folder), power=power)
        live: deque[list[int]] = deque()
        began, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            settled = live.popleft() if len(live) * to_a_step >= unsettled else []
            live.append(store.step(batch, settled))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        store.close()
    return count / seconds, cpu / count * 1e6


def main() -> int:
    checks = []
    for durability in ("process", "power"):
        for shape in SHAPES:
            rounds: dict[str, list[tuple[float, float]]] = {"segments": [], "blobs": []}
            for _ in range(ROUNDS):
                rounds["segments"].append(rate(SegmentStore, shape, power=durability == "power"))
                rounds["blobs"].append(rate(BlobStore, shape, power=durability == "power"))
            checks.append(compare(f"{durability} {shape}", SHAPES[shape][0], rounds, decides=durability == "process"))
            print(checks[-1])
    first = checks[0]
    ok = all(check["ok"] for check in checks)
    result = {
        "name": "journal",
        **{key: first[key] for key in ("ratio", "ours", "baseline", "limit")},
        "ok": ok,
        "checks": checks,
    }
    print(json.dumps(result))
    return 0 if ok else 1


def compare(name: str, size: int, rounds: dict[str, list[tuple[float, float]]], *, decides: bool) -> dict[str, Any]:
    """`ours` and `baseline` are CPU microseconds a message, `ratio` how many times less ours takes."""
    cpu = {store: min(each[1] for each in results) for store, results in rounds.items()}
    megabytes = {store: round(max(each[0] for each in results) * size / 1e6) for store, results in rounds.items()}
    ratio = cpu["blobs"] / cpu["segments"]
    return {
        "name": name,
        "ratio": round(ratio, 2),
        "ours": round(cpu["segments"], 1),
        "baseline": round(cpu["blobs"], 1),
        "megabytes_per_second": megabytes,
        "limit": 1.0 if decides else None,
        "ok": ratio >= 1.0 or not decides,
    }


if __name__ == "__main__":
    sys.exit(main())
