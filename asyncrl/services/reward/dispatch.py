"""Which samples go to which worker. Pure: time is an argument.

- Samples of rollouts go before those of evaluation; each kind goes in the order it came.
- A batch is one message. Cheap samples travel all together; dear ones spread over the workers.
- A serial worker has at most two batches (one that it works on, one that waits), a concurrent one at most `slots` samples.
- A sample whose worker was lost goes first to the next one that has room. One that so many workers were lost with that the next
  loss is its failure goes alone, to a worker that has nothing else: so no sample fails for what its neighbour does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from asyncrl.rewards import Item

BATCHES_OF_A_SERIAL_WORKER = 2
BATCH_SECONDS = 0.05  # a batch of dear samples takes about this long
CHEAP_SECONDS = 0.002  # less work than this is not worth a second message
LARGEST_BATCH = 256
FIRST_BATCH = 8  # while nothing is known of what a sample costs


@dataclass
class Job:
    """One sample on its way to a score. `key` is whatever its sender knows it by; `losses`: workers that it was lost with."""

    key: Hashable
    item: Item
    losses: int = 0


@dataclass(frozen=True)
class WorkerView:
    """What a worker says of itself. `incarnation` differs after each start."""

    name: str
    incarnation: str
    address: str
    fields: tuple[str, ...]
    is_serial: bool
    slots: int


@dataclass
class _Worker:
    """`alone`: it has one sample that is to answer for the worker's life by itself."""

    view: WorkerView
    seen: float
    batches: dict[int, list[Job]] = field(default_factory=dict)
    alone: bool = False

    @property
    def load(self) -> int:
        return sum(len(jobs) for jobs in self.batches.values())

    @property
    def room(self) -> int:
        if self.alone and self.batches:
            return 0
        if self.view.is_serial:
            return LARGEST_BATCH if len(self.batches) < BATCHES_OF_A_SERIAL_WORKER else 0
        return self.view.slots - self.load


@dataclass(frozen=True)
class Batch:
    """Jobs for one worker, in one message."""

    number: int
    worker: WorkerView
    jobs: tuple[Job, ...]


class Dispatcher:
    """`submit`, `assign`, `finish`; `register` and `silent` keep the list of workers. max_losses: a sample that so many workers
    were lost with has failed."""

    def __init__(self, max_losses: int = 2) -> None:
        self._max_losses = max_losses
        self._suspects: deque[Job] = deque()  # one loss away from their failure
        self._rollouts: deque[Job] = deque()
        self._evaluation: deque[Job] = deque()
        self._workers: dict[str, _Worker] = {}
        self._numbers = itertools.count()
        self._seconds_per_sample: float | None = None

    def submit(self, jobs: Sequence[Job], *, evaluation: bool = False) -> None:
        (self._evaluation if evaluation else self._rollouts).extend(jobs)

    def is_new(self, view: WorkerView) -> bool:
        """Whether this worker, or this life of it, is not known yet."""
        known = self._workers.get(view.name)
        return known is None or known.view.incarnation != view.incarnation

    def register(self, view: WorkerView, now: float) -> list[Job]:
        """A worker is there, or still there. What an earlier incarnation of it held is lost: the jobs that thereby failed."""
        known = self._workers.get(view.name)
        if known is not None and known.view.incarnation == view.incarnation:
            known.seen = now
            return []
        failed = self.lose(view.name) if known is not None else []
        self._workers[view.name] = _Worker(view, now)
        return failed

    def assign(self) -> Batch | None:
        """The next batch to send; None when nothing waits or nobody has room."""
        free = [worker for worker in self._workers.values() if worker.room > 0]
        if self._suspects and self._workers:
            least = min(self._workers.values(), key=lambda worker: (worker.load, worker.alone))
            if not least.load:
                return self._give(least, [self._suspects.popleft()], alone=True)
            free = [worker for worker in free if worker is not least]  # it is let run dry for the first suspect
        waiting = self._rollouts or self._evaluation
        if not waiting or not free:
            return None
        worker = min(free, key=lambda candidate: candidate.load)
        size = min(self._batch_size(len(waiting)), worker.room)
        return self._give(worker, [waiting.popleft() for _ in range(size)])

    def _give(self, worker: _Worker, jobs: list[Job], *, alone: bool = False) -> Batch:
        number = next(self._numbers)
        worker.batches[number], worker.alone = jobs, alone
        return Batch(number, worker.view, tuple(jobs))

    def holds(self, batch: Batch) -> bool:
        """Whether its worker is still to do this batch."""
        worker = self._workers.get(batch.worker.name)
        return worker is not None and batch.number in worker.batches

    def finish(self, batch: Batch, seconds: float) -> bool:
        """The batch was answered, after `seconds` of work. False when it was given up before: its answers come too late."""
        worker = self._workers.get(batch.worker.name)
        if worker is None or worker.batches.pop(batch.number, None) is None:
            return False
        measured = seconds / len(batch.jobs)
        previous = self._seconds_per_sample
        self._seconds_per_sample = measured if previous is None else 0.8 * previous + 0.2 * measured
        return True

    def give_up(self, batch: Batch) -> list[Job]:
        """The worker lives but did not do this batch. The jobs that thereby failed; the others wait again, first in line."""
        worker = self._workers.get(batch.worker.name)
        jobs = worker.batches.pop(batch.number, None) if worker is not None else None
        return self._lost(jobs or [])

    def lose(self, name: str) -> list[Job]:
        """The worker is gone. The jobs that thereby failed."""
        worker = self._workers.pop(name)
        return self._lost([job for jobs in worker.batches.values() for job in jobs])

    def silent(self, now: float, seconds: float) -> list[str]:
        """Workers not heard of for `seconds`."""
        return [name for name, worker in self._workers.items() if now - worker.seen > seconds]

    @property
    def seconds_per_sample(self) -> float | None:
        """A moving mean over batches."""
        return self._seconds_per_sample

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def num_waiting(self) -> int:
        return len(self._suspects) + len(self._rollouts) + len(self._evaluation)

    @property
    def num_assigned(self) -> int:
        return sum(worker.load for worker in self._workers.values())

    def _lost(self, jobs: Sequence[Job]) -> list[Job]:
        for job in jobs:
            job.losses += 1
        left = [job for job in jobs if job.losses < self._max_losses]
        self._rollouts.extendleft(job for job in reversed(left) if job.losses < self._max_losses - 1)
        self._suspects.extend(job for job in left if job.losses == self._max_losses - 1)
        return [job for job in jobs if job.losses >= self._max_losses]

    def _batch_size(self, waiting: int) -> int:
        """All that waits while it is cheap; else an even share per worker, of about BATCH_SECONDS; a few at first."""
        seconds = self._seconds_per_sample
        if seconds is not None and seconds * waiting <= CHEAP_SECONDS:
            return min(waiting, LARGEST_BATCH)
        share = -(-waiting // len(self._workers))
        if seconds is None:
            return min(share, FIRST_BATCH)
        timed = max(1, int(BATCH_SECONDS / seconds)) if seconds else LARGEST_BATCH
        return min(share, timed, LARGEST_BATCH)
