"""Progress for a person: a live line in a terminal, plain lines every few seconds where there is none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_SECONDS = 5.0
RATE_STEPS = 20

SHOWN = (
    ("reward/mean", "reward {:.3f}"),
    ("eval/score", "eval {:.3f}"),
    ("staleness/max", "staleness {:.0f}"),
    ("rollouter/tokens_per_second", "{:,.0f} tokens/s"),
)
"""Metrics of the line, in order, where they exist."""

UNSCORED = "scoring/failed"
"""Responses whose reward function raised, was too slow or gave no number, so far."""


class ConsoleProgress:
    """steps: `training.steps`; bound: no token older than that many versions trains. The trainer's records move the line, the
    others fill it in."""

    def __init__(self, stream: TextIO, *, steps: int, bound: int, now: Callable[[], float] = time.monotonic):
        self._stream, self._steps, self._bound, self._now = stream, steps, bound, now
        self._began = now()
        self._step = 0
        self._state = ""
        self._latest: dict[str, float] = {}
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._printed = self._began - PLAIN_SECONDS
        self._said = ""
        self._closed = False
        self._live = _live_line(stream, steps) if stream.isatty() else None

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        self._latest.update(metrics)
        if axis == "trainer":
            self._step = step
            self._arrivals.append((self._now(), step))
        self._show(force=axis == "trainer" and step >= self._steps)

    def state(self, text: str) -> None:
        """What the run as a whole does ("starting", "2/7 services up", "running", …)."""
        if text != self._state:
            self._state = text
            self._show(force=not text[:1].isdigit())  # counts ("2/7 services up") only where they overwrite each other

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._live.stop()

    def line(self) -> str:
        """The figures and the time left, as text."""
        figures = [text.format(self._latest[name]) for name, text in SHOWN if name in self._latest]
        figures = [f"{f} of {self._bound}" if f.startswith("staleness") else f for f in figures]
        if self._latest.get(UNSCORED):
            figures.append(f"{self._latest[UNSCORED]:,.0f} responses not scored")
        left = self.seconds_left()
        figures.append(f"{_duration(self._now() - self._began)} elapsed")
        if left is not None:
            figures.append(f"{_duration(left)} left")
        return ", ".join(figures)

    def seconds_left(self) -> float | None:
        """From the pace of the last RATE_STEPS steps; None before there are two."""
        if len(self._arrivals) < 2 or self._arrivals[-1][1] == self._arrivals[0][1]:
            return None
        (first_time, first_step), (last_time, last_step) = self._arrivals[0], self._arrivals[-1]
        return (last_time - first_time) / (last_step - first_step) * max(self._steps - last_step, 0)

    def _before_a_step(self) -> str:
        """A reward that always fails leaves nothing to train on, so the run never gets past this: it must say so itself."""
        failed = self._latest.get(UNSCORED)
        if not failed:
            return self._state
        why = "`asyncrl samples RUN --state failed` says why"
        return f"{self._state}: no step yet, {failed:,.0f} responses could not be scored ({why})"

    def _show(self, *, force: bool) -> None:
        if self._closed:
            return
        if self._live is not None:
            task = self._live.tasks[0].id
            self._live.update(task, completed=self._step, figures=self.line() if self._step else self._before_a_step())
        elif force or self._now() - self._printed >= PLAIN_SECONDS:
            text = f"step {self._step}/{self._steps}: {self.line()}" if self._step else self._before_a_step()
            if text != self._said:
                self._printed, self._said = self._now(), text
                self._stream.write(f"{text}\n")
                self._stream.flush()


def _live_line(stream: TextIO, steps: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[figures]}"))
    progress = Progress(*columns, console=Console(file=stream), refresh_per_second=4)
    progress.add_task("steps", total=steps, figures="starting")
    progress.start()
    return progress


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
