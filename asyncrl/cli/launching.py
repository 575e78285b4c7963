"""`launch`: from a file to a finished run, with signals that end it cleanly and a last word that says what to try next."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from asyncrl.cli.boundary import EXIT_INTERRUPTED
from asyncrl.cli.checking import checked, plan_text
from asyncrl.cli.summary import summary_text
from asyncrl.cli.words import print_json
from asyncrl.config.plan import make_plan
from asyncrl.config.schema import Config
from asyncrl.pipeline import Pipeline, Run
from asyncrl.pipeline.resuming import check_may_go_on, finished_summary, folder_to_resume
from asyncrl.pipeline.run_dir import check_run_dir, check_state_folder
from asyncrl.pipeline.run_folder import RunFolder
from asyncrl.tracking.spool import FILE_NAME as SPOOL
from asyncrl.tracking.store import ui_command

SLICE_SECONDS = 0.5


def launch(file: Path, overrides: Sequence[str], *, run_dir: Path | None, resume: str, dry_run: bool, as_json: bool) -> int:
    """Run the pipeline and return the exit code. Raises UserError for what is refused before anything starts."""
    if dry_run:
        return _dry_run(file, overrides, run_dir=run_dir, resume=resume, as_json=as_json)
    pipeline = Pipeline.from_yaml(file, overrides)
    with _ending_on_signals(preemption_seconds=pipeline.config.cluster.preemption_grace_seconds) as ending:
        run = pipeline.launch(run_dir, resume=resume, progress=not as_json)
        ending.take(run)
        if not as_json:
            print(f"run directory: {_short(run.run_dir)}", *run.resumed, sep="\n", flush=True)
            for note in make_plan(pipeline.config, pipeline.facts).notes:
                print(f"note: {note}", flush=True)
        summary = _wait(run, ending)
    if as_json:
        print_json({**summary, "run_dir": str(run.run_dir)})
    else:
        mlflow = pipeline.config.tracking.mlflow
        if summary["status"] == "finished" and summary["steps"] < pipeline.config.training.steps:
            print(f"note: the data ended before {pipeline.config.training.steps} steps were trained (data.epochs)")
        again = run.run_dir / "config.yaml" if overrides else file
        on_policy = f"asyncrl launch {_short(again)} {_on_policy(pipeline.config)}"
        _last_word(run.run_dir, summary, on_policy=on_policy, mlflow_uri=mlflow.uri if mlflow is not None else None)
    return int(summary["exit_code"])


def _dry_run(file: Path, overrides: Sequence[str], *, run_dir: Path | None, resume: str, as_json: bool) -> int:
    """What would start, and everything that would be refused; nothing is made."""
    earlier = folder_to_resume(resume, run_dir)
    if earlier is None:
        check_run_dir(run_dir)
    config, facts = checked(file, overrides)
    if earlier is not None and finished_summary(earlier, config) is None:
        check_may_go_on(earlier, config)
    check_state_folder(earlier or run_dir, config)
    plan = make_plan(config, facts)
    if as_json:
        print_json({**plan.to_mapping(), "config": config.to_mapping()})
    else:
        print(plan_text(plan))
    return 0


def _wait(run: Run, ending: _Ending) -> dict[str, Any]:
    """Wait for the summary. Ray, once it is up, puts a handler of its own over ours, which prints a stack trace: ours goes
    back."""
    while True:
        try:
            return run.wait(timeout=SLICE_SECONDS)
        except TimeoutError:
            ending.listen()


class _Ending:
    """The first signal asks the run to stop, as soon as there is one (SIGTERM: within preemption_seconds); the second ends this
    process and its children at once."""

    def __init__(self, signals: tuple[signal.Signals, ...], preemption_seconds: float) -> None:
        self.signals, self._preemption_seconds = signals, preemption_seconds
        self._run: Run | None = None
        self._asked = False
        self._seconds: float | None = None

    def listen(self) -> None:
        for which in self.signals:
            signal.signal(which, self.on_signal)

    def take(self, run: Run) -> None:
        self._run = run
        if self._asked:
            run.stop(self._seconds)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked:
            _end_at_once(self._run)
        self._asked = True
        self._seconds = self._preemption_seconds if number == signal.SIGTERM else None
        os.write(2, f"\n{name}: ending the run cleanly; once more ends it at once\n".encode())
        if self._run is not None:
            self._run.stop(self._seconds)


@contextmanager
def _ending_on_signals(*, preemption_seconds: float) -> Iterator[_Ending]:
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup: a closed terminal is none of the run's business
        del before[signal.SIGHUP]
    ending = _Ending(tuple(before), preemption_seconds)
    ending.listen()
    try:
        yield ending
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _end_at_once(run: Run | None) -> None:
    """No summary and no farewell; still no process and no shared memory left behind."""
    import psutil

    from asyncrl.cluster.sweep import Family, remove_shared_memory

    try:
        Family(psutil.Process().children()).kill(wait_seconds=3.0)
        started = RunFolder.open(run.run_dir).started if run is not None else None
        if started is not None:
            remove_shared_memory(started["run_id"])
    finally:
        os._exit(EXIT_INTERRUPTED)


def _on_policy(config: Config) -> str:
    """The overrides that make this pipeline on-policy, whatever else it asks for that would then be refused."""
    ones = ("publish_every", "mini_batches", "epochs_per_batch")
    preset = ["rollout.preset=null"] if config.rollout.preset is not None else []
    sets = [*preset, "rollout.max_staleness=0", *(f"training.{name}=1" for name in ones if getattr(config.training, name) != 1)]
    return " ".join(f"--set {each}" for each in sets)


def _last_word(run_dir: Path, summary: dict[str, Any], *, on_policy: str, mlflow_uri: str | None) -> None:
    """What happened, and what to try next. on_policy: the command that runs the same on-policy."""
    status, folder = summary["status"], _short(run_dir)
    if (run_dir / SPOOL).exists():
        print(
            f"MLflow did not take every figure: the rest is in {folder}/{SPOOL}; once {mlflow_uri} answers, run: "
            f"python -m asyncrl.tracking.replay {folder}",
            file=sys.stderr,
        )
    if status == "failed":
        print(f"error: the run failed after {summary['steps']} steps: {summary['error']}", file=sys.stderr)
        print(f"logs: {folder}/logs; the whole summary: {folder}/summary.json", file=sys.stderr)
        return
    print()
    print(summary_text(summary))
    if not summary["steps"]:
        return
    print()
    print("what to try next:")
    tries = [
        (f"asyncrl samples {folder}", "read what the model wrote"),
        (f"asyncrl audit {folder}", "where every prompt group went"),
        ("asyncrl check --explain rollout.max_staleness", "what a key means"),
    ]
    if summary["staleness"]["bound"] > 0:
        tries.insert(2, (on_policy, "the same on-policy: slower, nothing stale"))
    if mlflow_uri is not None and summary["mlflow_run_id"] is not None:
        tries.insert(2, (ui_command(mlflow_uri), "every figure as a curve"))
    width = max(len(command) for command, _ in tries)
    for command, what in tries:
        print(f"  {command.ljust(width)}   {what}")


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
