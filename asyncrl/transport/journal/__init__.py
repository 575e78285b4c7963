"""The queue's journal: what was accepted and is not settled survives the queue's process (`process`) or a power cut (`power`).

    accepted ─▶ payloads ─▶ segment files (append only) ─┐ synced under `power`
                ids, places ─▶ the ledger's file ────────┴─▶ one transaction ─▶ only then is anybody told
    settled  ─▶ its row goes, in the transaction that says why; a segment without rows is deleted

`segments` are the files, `journal` ties them to the rows (`protocols.journal.JournalIndex`) and to the Exchange. Imports
protocols, errors.

Why files: a payload in the ledger's file (SQLite) is written twice, to its log and to its pages. Measured beside each other
(`tests/benchmarks/journal.py`, steps of 32 × 8 KB and of 5 MB, two cores, one virtual disk): under `process` files take 14 µs of
CPU for 8 KB and 3.4 ms for 5 MB, blobs 31 µs and 22 ms; 160 and 295 MB/s against 71 and 50. Under `power` the disk's two syncs a
step (segment, then rows) level 8 KB out (22 and 24 MB/s); 5 MB go at 133 MB/s against 44.
"""

from asyncrl.transport.journal.journal import Fate, Journal, Lost, NoJournal, Recovered, SegmentJournal

__all__ = ["Fate", "Journal", "Lost", "NoJournal", "Recovered", "SegmentJournal"]
