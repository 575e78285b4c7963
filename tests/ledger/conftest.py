"""A small run: random legal histories, written as the message queue's process and the trainer write them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from asyncrl.ledger.record import LedgerRecord, QueueHead, read_ledger
from asyncrl.ledger.set_back import Held
from asyncrl.ledger.store import FILE_NAME, LedgerWriter
from asyncrl.messages import GroupId
from asyncrl.messages.order import prompt_order
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord

ENDS = ("filtered", "failed", "expired")
REASONS = {"filtered": "zero variance", "failed": "too few scored: 1 of 8", "expired": "staleness 3"}


GROUP_SIZE = 2


class SmallRun:
    """`act` makes one random legal move; the ledger is in the file after each. With `restarts`, rollouters are lost, and the
    trainer is set back, among the moves; `keep` says whether the queue keeps what it held then."""

    def __init__(self, run_dir: Path, seed: int, *, restarts: bool = False, keep: bool = True):
        self.run_dir = run_dir
        self.random = random.Random(seed)
        self.num_rows = self.random.choice([None, 3, 7, 50])
        self.shuffle = self.random.random() < 0.5
        self.seed = self.random.randrange(2**40)
        self.epoch = self.position = 0
        run_dir.mkdir(parents=True, exist_ok=True)
        self.writer = LedgerWriter(run_dir / FILE_NAME, wall=lambda: 1000.0)
        self.attempts = self.writer.attempts
        self.restarts, self.keep = restarts, keep
        self.head = QueueHead("process" if restarts and keep else "none", False)
        self.incarnation = 0
        self.writer.start(0, self.head)

    def act(self) -> None:
        moves = [self.dispatch, self.dispatch, self.queue, self.queue, self.end, self.step]
        if self.restarts:
            moves += [self.lose, self.restart, self.restart, self.set_back]
        self.random.choice(moves)()
        self.writer.flush()

    def play(self, moves: int) -> SmallRun:
        for _ in range(moves):
            self.act()
        return self

    def dispatch(self) -> None:
        groups = [Dispatch(id, self.attempts.finished_steps) for id in self.attempts.owed() if self.random.random() < 0.7]
        groups += [Dispatch(self.draw(), self.attempts.finished_steps) for _ in range(self.random.randrange(1, 4))]
        cursor = PromptCursor(self.epoch, self.position, self.num_rows, self.seed, self.shuffle)
        self.writer.append(self.attempts.dispatch(groups, cursor))

    def draw(self) -> GroupId:
        if self.position == self.num_rows:
            self.epoch, self.position = self.epoch + 1, 0
        row = prompt_order(self.seed, self.epoch, self.num_rows, self.shuffle)[self.position]
        self.position += 1
        return GroupId(self.epoch, row, 0)

    def live(self, state: str) -> list[GroupId]:
        return [group.id for group in self.attempts.live() if group.state == state]

    def queue(self) -> None:
        flying = self.live("in_flight")
        if flying:
            self.writer.append(self.attempts.queue(self.random.sample(flying, self.random.randint(1, len(flying)))))

    def end(self) -> None:
        flying = self.live("in_flight")
        if flying:
            state = self.random.choice(["failed", "expired"])
            end = End(self.random.choice(flying), state, REASONS[state], reissue=self.random.random() < 0.5)
            self.writer.append(self.attempts.end([end]))

    def step(self) -> None:
        queued = self.live("queued")
        taken = self.random.sample(queued, self.random.randint(0, len(queued)))
        ends = []
        for id in taken:
            if self.random.random() < 0.6:
                ends.append(End(id, "trained"))
            else:
                state = self.random.choice(ENDS)
                ends.append(End(id, state, REASONS[state], reissue=self.random.random() < 0.3))
        record = StepRecord(self.attempts.finished_steps + 1, self.attempts.finished_steps, tuple(ends))
        self.write_batch(record)
        self.writer.append(self.attempts.finish_step(record))

    def lose(self) -> None:
        flying = self.live("in_flight")
        if flying:
            self.writer.append(self.attempts.take_back(self.random.sample(flying, 1), "the rollouter was lost"))

    def restart(self) -> None:
        self.writer.append(self.attempts.restart([Dispatch(id, self.attempts.finished_steps) for id in self.attempts.returned()]))

    def set_back(self) -> None:
        """To a random step; of what the queue held a part is lost."""
        if self.random.random() < 0.6:
            return
        step = self.random.randint(0, self.attempts.finished_steps)
        everything = {row.id for row in self.record().transitions}
        scored = {id for id in everything if self.random.random() < 0.8}
        members = {id: range(self.random.randint(0, GROUP_SIZE)) for id in everything}
        held = Held(GROUP_SIZE, scored, members) if self.keep else None
        self.go_back(step, held)

    def go_back(self, step: int, held: Held | None) -> None:
        self.incarnation += 1
        self.attempts = self.writer.set_back(step, self.incarnation, self.head, held)
        if not self.keep:
            cursor = self.attempts.cursor
            self.epoch, self.position = (cursor.epoch, cursor.position) if cursor else (0, 0)
        path = self.run_dir / "batches.jsonl"
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            path.write_text("".join(line + "\n" for line in lines))

    def record(self) -> LedgerRecord:
        self.writer.flush()
        return read_ledger(self.run_dir / FILE_NAME)

    def write_batch(self, record: StepRecord) -> None:
        groups = [str(end.id) for end in record.ends if end.state == "trained"]
        line = {"step": record.step, "version": record.version, "groups": groups, "token_versions": None}
        with (self.run_dir / "batches.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish_training(self) -> None:
        self.writer.append(self.attempts.finish_training(self.attempts.finished_steps))
        self.writer.flush()


@pytest.fixture
def small_run(tmp_path):
    """Make a small run by its seed; its file is closed at the end."""
    runs = []

    def make(seed: int = 0, moves: int = 0, **options: bool) -> SmallRun:
        runs.append(SmallRun(tmp_path / f"run{len(runs)}", seed, **options))
        return runs[-1].play(moves)

    yield make
    for run in runs:
        run.writer.close()
