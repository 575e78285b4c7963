"""What a run directory says: the run that lives in it, or how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import TransportError, UserError

if TYPE_CHECKING:
    from asyncrl.transport.security import Door

ANSWER_SECONDS = 10.0
CLOCK_SLACK_SECONDS = 2.0


@dataclass(frozen=True)
class RunFolder:
    """A run directory. `started` is its run.json, written when the launcher came up; `summary` its summary.json, written at the
    end; either may be missing."""

    path: Path
    started: dict[str, Any] | None
    summary: dict[str, Any] | None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Raises UserError for a folder that holds no run."""
        if not path.is_dir():
            raise UserError(f"{path} is no run directory, there is no such folder: give the one that `asyncrl launch` named")
        started, summary = _read(path / "run.json"), _read(path / "summary.json")
        if started is None and summary is None and not (path / "ledger.sqlite").exists():
            found = "is empty" if not any(path.iterdir()) else "has no run.json, summary.json or ledger.sqlite"
            raise UserError(f"{path} is no run directory, it {found}: give the one that `asyncrl launch` named")
        return cls(path, started, summary)

    @property
    def lives(self) -> bool:
        """Whether the launcher is there and has not written the end yet."""
        return self.summary is None and self._launcher_lives()

    def answers(self) -> bool:
        """Whether the launcher still serves calls: it does until the very end, shortly after it wrote the summary."""
        if not self._launcher_lives():
            return False
        try:
            self.ask("book", timeout=1.0)
        except TransportError:
            return False
        return True

    def ask(self, method: str, *, timeout: float = ANSWER_SECONDS, **params: Any) -> Any:
        """Ask the supervisor of a live run. Raises TransportError when it does not answer in time, UserError for a run whose keys
        are another user's."""
        from asyncrl.transport.rpc import call_once

        assert self.started is not None, "only a run that started can be asked"
        return call_once(str(self.started["rpc"]), method, timeout=timeout, door=self.door(), **params)

    def door(self) -> Door:
        """To a live run's processes. Raises as `ask`."""
        from asyncrl.transport.security import door_to

        assert self.started is not None, "only a run that started can be asked"
        return door_to(self.path, str(self.started["rpc"]))

    def _launcher_lives(self) -> bool:
        return self.started is not None and _process_lives(int(self.started["pid"]), float(self.started["started"]))

    def status(self) -> dict[str, Any]:
        """The supervisor's own answer; of a run that has ended, what its files say. `state` is starting, running, stopping,
        finished, failed, interrupted, silent (it lives and does not answer) or lost (it died without a word)."""
        if self.lives:
            try:
                return {**self.ask("status"), "run_dir": str(self.path)}
            except TransportError as error:
                again = RunFolder.open(self.path)
                if again.lives:
                    return {**self._without_services("silent"), "error": str(error)}
                return again.status()
        if self.summary is not None:
            summary = self.summary
            return {
                **self._without_services(summary["status"]),
                "step": summary["steps"],
                "error": summary["error"],
                "summary": summary,
            }
        launcher = f"its launcher, process {self.started['pid']}, is gone" if self.started else "nobody wrote its end"
        return {
            **self._without_services("lost"),
            "error": f"the run ended without a summary: {launcher}; read {self.path / 'logs'}, and let it go on by launching it "
            f"again with --run-dir {self.path}",
        }

    def _without_services(self, state: str) -> dict[str, Any]:
        started = self.started or {}
        return {
            "state": state,
            "name": started.get("name"),
            "run_id": started.get("run_id"),
            "run_dir": str(self.path),
            "step": self._finished_steps(),
            "steps": self._asked_steps(),
            "services": [],
            "metrics": self._last_metrics(),
        }

    def _asked_steps(self) -> int | None:
        """`training.steps` of its config.yaml, where that can be read."""
        from asyncrl.config.load import load_config

        try:
            return load_config(self.path / "config.yaml").config.training.steps
        except UserError:
            return None

    def _finished_steps(self) -> int:
        return int(self._last_metrics().get("step", 0))

    def _last_metrics(self) -> dict[str, Any]:
        """The newest line of metrics.jsonl that is whole."""
        try:
            lines = (self.path / "metrics.jsonl").read_bytes()[-65_536:].splitlines()
        except FileNotFoundError:
            return {}
        for line in reversed(lines):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return {}


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is no such file. Both files are renamed into place, so they are whole."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): the run directory is damaged") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no object: the run directory is damaged")
    return found


def _process_lives(pid: int, before: float) -> bool:
    """Whether that process is there, and began before that wall time: its id may have been given to another since. A zombie is
    none: it has ended, and nobody has waited for it yet."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= before + CLOCK_SLACK_SECONDS
    except psutil.NoSuchProcess:
        return False
