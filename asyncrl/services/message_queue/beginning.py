"""How queue and ledger begin: from nothing, from what an earlier process left, or set back to a checkpoint.

ledger.sqlite ─▶ states ──┐
                          ├─▶ Fresh | SetBack | Restarted ─▶ one transaction ─▶ what is whole is offered again
journal ─▶ what is whole ─┘

             process, power                                         none
Fresh        —                                                      —
SetBack      what the journal lacks is returned                     the ledger is what it was; what is live is returned
Restarted    what turned out to be wrong has failed, and its        what the trainer holds stays queued, all else that is
             prompt starts again (nobody else was started anew)     live is returned
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.errors import LedgerError
from asyncrl.ledger.file_systems import JOURNAL_FOLDER, make_state_folder
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.ledger.record import FILE_NAME, LedgerRecord, QueueHead, read_ledger
from asyncrl.ledger.states import END_STATES
from asyncrl.ledger.store import LedgerWriter
from asyncrl.messages import GroupId
from asyncrl.protocols import End
from asyncrl.protocols.journal import JournalEntry
from asyncrl.services.message_queue.recovery import Fresh, Recovery, Restarted, SetBack
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED, LedgerHooks, connect, held_of, parse, topics_of
from asyncrl.transport.journal import Lost, NoJournal, SegmentJournal
from asyncrl.transport.journal.segments import Segments

log = logging.getLogger(__name__)


class Beginning:
    """`begin` opens the files and makes the queue and the ledger stand where `recovery` says; `close` lets go of the journal."""

    def __init__(self, config: Config, run_dir: Path, recovery: Recovery, *, clock: Clock):
        self._config, self._run_dir, self._recovery, self._clock = config, run_dir, recovery, clock
        self.ledger = LocalLedgerClient()
        durability = config.queue.durability
        self._keeps, self._power = durability != "none", durability == "power"
        self._head = QueueHead(durability, self._keeps and config.checkpoint.every > 0)
        self._journal: SegmentJournal | NoJournal = NoJournal()
        self.queue: LedgerHooks

    def begin(self) -> None:
        """Raises UserError for a folder that cannot hold the state, LedgerError and StorageFailed when the disk refuses, or when
        the ledger does not fit the recovery."""
        folder = make_state_folder(self._run_dir, self._config.cluster.state_dir)
        writer = LedgerWriter(folder / FILE_NAME, wall=self._clock.wall, power=self._power)
        entries, lost = self._open_journal(folder / JOURNAL_FOLDER, writer)
        is_new = self._start(writer, entries)
        self.ledger.write_to(writer)
        self.queue = connect(
            self.ledger,
            topics_of(self._config),
            lease_seconds=self._config.queue.lease_seconds,
            journal=self._journal,
            retains=self._head.retains,
            members_per_group=self._config.members_per_group,
        )
        if not is_new:
            self._go_on(lost)
        self._offer(writer)
        self.ledger.flush()
        self._journal.written()

    @property
    def num_lost(self) -> int:
        """Records of the journal that turned out to be wrong."""
        return self._journal.num_lost if isinstance(self._journal, SegmentJournal) else 0

    def close(self) -> None:
        """Let go of the journal's files."""
        if isinstance(self._journal, SegmentJournal):
            self._journal.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open_journal(self, folder: Path, writer: LedgerWriter) -> tuple[Sequence[JournalEntry], Sequence[Lost]]:
        if self._keeps:
            self._journal = SegmentJournal(Segments(folder, power=self._power), writer.journal)
            return self._journal.open()
        writer.journal.remove([entry.ticket for entry in writer.journal.entries()])  # of a run that was durable once
        writer.flush()
        if folder.exists():
            segments = Segments(folder, power=False)
            segments.drop(segments.found)
        return (), ()

    def _start(self, writer: LedgerWriter, entries: Sequence[JournalEntry]) -> bool:
        """A start of the trainer, if this is one. False: the queue's process alone is new."""
        match self._recovery:
            case Fresh(incarnation):
                if writer.has_started:
                    raise LedgerError(
                        f"{writer.path} is the ledger of an earlier run: resume it (--resume auto), or name another run directory"
                    )
                writer.start(incarnation, self._head)
                return True
            case SetBack(step, incarnation):
                if writer.last_start is not None and writer.last_start.incarnation >= incarnation:
                    return False  # it was made, and then this process was lost
                scored = [entry.group_id for entry in entries if entry.topic == SCORED]
                members = [entry.message_id for entry in entries if entry.topic == ROLLOUTS]
                held = held_of(self._config.members_per_group, scored, members) if self._keeps else None
                writer.set_back(step, incarnation, self._head, held)
                return True
        writer.keep_queue(self._head)
        return False

    def _go_on(self, lost: Sequence[Lost]) -> None:
        """The other processes live, and know nothing of this."""
        held = self._recovery.held if isinstance(self._recovery, Restarted) else frozenset()
        attempts = self.ledger.attempts
        if not self._keeps:
            stay = {group.id for group in attempts.live() if group.state == "queued" and group.id in held}
            self.queue.kept = frozenset(stay)
            self.ledger.take_back([group.id for group in attempts.live() if group.id not in stay], "the queue was lost")
            return
        in_hand = {
            id for each in lost if each.taken and (id := parse(each.group_id)) is not None and attempts.state(id) == "queued"
        }
        self.queue.kept = frozenset(in_hand)
        gone = {id: each for each in lost if (id := parse(each.group_id)) is not None and id in attempts and id not in in_hand}
        reason = "lost from the queue's journal: "
        self.ledger.cut_short(
            [End(id, "failed", f"{reason}{each.message_id}: {each.reason}", reissue=True) for id, each in gone.items()]
        )

    def _offer(self, writer: LedgerWriter) -> None:
        """What the journal holds of attempts without an end is in the queue again, and what had ended has ended."""
        for topic, producers in writer.closed_streams().items():
            self.queue.exchange.topic(topic).restore_closed(producers)
        if not isinstance(self._journal, SegmentJournal):
            return
        ended_by = ends_by_step(read_ledger(writer.path)) if self._head.retains else {}
        recovered = self._journal.recover(lambda topic, group_id: self.queue.fate_of(topic, group_id, ended_by))
        self.queue.sort_retained()
        if isinstance(self._recovery, SetBack):
            self.queue.release(self._recovery.step)
        self.queue.exchange.restore(recovered)
        if recovered:
            log.info("%d messages recovered from the queue's journal", len(recovered))


def ends_by_step(record: LedgerRecord) -> dict[GroupId, int]:
    """For every attempt that has ended, the first step whose checkpoint holds its end."""
    steps = [row.seq for row in record.steps]
    return {row.id: bisect_left(steps, row.seq) + 1 for row in record.transitions if row.state in END_STATES}
