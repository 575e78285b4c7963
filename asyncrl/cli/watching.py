"""`status`, `top` and `stop`: a run, seen and ended from outside."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cli.boundary import EXIT_FAILED
from asyncrl.cli.summary import checkpoint_text, summary_text
from asyncrl.cli.words import at, number, print_json, seconds, table
from asyncrl.errors import RunError, TransportError
from asyncrl.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_SECONDS = 1.0
POLL_SECONDS = 0.1
LIVE_STATES = ("starting", "running", "stopping", "silent")

FIGURES = (
    ("reward, mean of the step", "reward/mean"),
    ("evaluation", "eval/score"),
    ("staleness, mean", "staleness/mean"),
    ("staleness, most", "staleness/max"),
    ("staleness, bound now", "staleness/bound"),
    ("entropy", "policy/entropy"),
    ("gradient norm", "grad/norm"),
    ("learning rate", "learning_rate"),
    ("tokens generated per second", "rollouter/tokens_per_second"),
    ("trajectories per second", "rollouter/trajectories_per_second"),
    ("pause for new weights, ms", "sync/pause_ms"),
    ("transfer of new weights, ms", "sync/transfer_ms"),
)
"""What `top` shows of the newest metrics, where they exist; queue depths and idle shares are gathered by their prefix."""


def status(run: Path, *, as_json: bool) -> int:
    found = RunFolder.open(run).status()
    if as_json:
        print_json(found)
    else:
        print(status_text(found))
    return 0


def top(run: Path, *, once: bool, as_json: bool) -> int:
    """Refresh until the run ends or Ctrl-C; once for JSON and where there is no terminal."""
    folder = RunFolder.open(run)
    found = folder.status()
    if as_json:
        print_json({**found, "figures": dict(figures(found))})
        return 0
    if once or not sys.stdout.isatty() or found["state"] not in LIVE_STATES:
        print(top_text(found))
        return 0
    try:
        _refresh(run, found)
    except KeyboardInterrupt:
        print("left; the run goes on")
    return 0


def stop(run: Path, *, timeout: float, as_json: bool) -> int:
    """Ask, then wait until the end is written and the launcher has gone. A run that has ended is left as it is."""
    folder = RunFolder.open(run)
    if not folder.lives:
        found = folder.status()
        if as_json:
            print_json(found)
        else:
            print(f"nothing to stop: {_headline(found)}")
        return EXIT_FAILED if found["state"] == "lost" else 0
    deadline = time.monotonic() + timeout
    try:
        folder.ask("stop", timeout=min(timeout, 10.0))
    except TransportError as error:
        if RunFolder.open(run).lives:
            assert folder.started is not None, "a run that lives has started"
            raise RunError(f"the run does not answer ({error}): end it with kill -TERM {folder.started['pid']}") from error
    while (folder := RunFolder.open(run)).lives or folder.answers():
        if time.monotonic() > deadline:
            raise RunError(
                f"the run was asked to stop and is still going after {timeout:g} s: wait longer, or see {run / 'logs'}"
            )
        time.sleep(POLL_SECONDS)
    found = folder.status()
    if as_json:
        print_json(found)
    else:
        print(_headline(found))
    return EXIT_FAILED if found["state"] in ("lost", "failed") else 0


def status_text(found: Mapping[str, Any]) -> str:
    lines = [_headline(found)]
    if found["services"]:
        lines += ["", table(("service", "pid", "host", "state", "version"), [_service(row) for row in found["services"]])]
    trainer = next((row for row in found["services"] if "checkpoints_failed" in row), None)
    if trainer is not None:
        lines += ["", f"checkpoint: {checkpoint_text(trainer)}"]
    if (sentences := health(found)) is not None:
        lines += ["", *sentences]
    if "summary" in found:
        lines += summary_text(found["summary"]).splitlines()[1:]
    return "\n".join(lines)


def top_text(found: Mapping[str, Any]) -> str:
    return "\n".join([status_text(found), "", *(f"{name.ljust(32)}{value}" for name, value in figures(found))]).rstrip()


def figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `top` shows, as (name, value) texts."""
    metrics = found.get("metrics") or {}
    shown = [(name, f"{metrics[key]:.4g}") for name, key in FIGURES if isinstance(metrics.get(key), int | float)]
    services = {row["name"]: row for row in found["services"]}
    for topic, depth in (at(services, "message_queue", "depth") or {}).items():
        shown.append((f"queue depth, {topic}", str(depth)))
    for key, value in sorted(metrics.items()):
        service = key.removeprefix("idle/")
        if key != service and "/" not in service and isinstance(value, int | float):
            shown.append((f"idle share, {service}", f"{value:.0%}"))
    for name, row in services.items():
        if name.startswith("inference/") and "kv_use" in row:
            shown.append((name, server_text(row)))
    waiting = at(services, "rollouter", "waiting_for")
    if waiting:
        shown.append(("rollouter waits for", str(waiting)))
    return shown


def health(found: Mapping[str, Any]) -> list[str] | None:
    """What the trainer says of its figures, a sentence a line; None where it says nothing."""
    lines = next((row["health"] for row in found["services"] if "health" in row), None)
    return None if lines is None else [f"health: {line}" for line in lines or ["every figure is in its sane range"]]


def server_text(row: Mapping[str, Any]) -> str:
    """An SGLang server's load, and what its last version took."""
    parts = [f"{row['running']:g} running, {row['waiting']:g} waiting, {row['kv_use']:.0%} of KV"]
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if "pause_ms" in row:
        parts.append(f"pause {row['pause_ms']:.1f} ms, transfer {row['transfer_ms']:.0f} ms")
    return ", ".join(parts)


def _headline(found: Mapping[str, Any]) -> str:
    name = f"{found['name']}: " if found.get("name") else ""
    of = f" of {found['steps']}" if found.get("steps") else ""
    took = at(found, "summary", "wall_s") or found.get("elapsed_s")
    after = f", {seconds(took)}" if took is not None else ""
    reward = at(found, "summary", "reward", "last")
    rewarded = f", reward {number(reward)}" if reward is not None else ""
    error = f"\n{found['error']}" if found.get("error") else ""
    return f"{name}{found['state']}, step {found['step']}{of}{after}{rewarded}{error}"


def _service(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in ("name", "pid", "host", "state", "version"))


def _refresh(run: Path, found: dict[str, Any]) -> None:
    from rich.live import Live

    with Live(_screen(found), auto_refresh=False, screen=False) as live:
        while found["state"] in LIVE_STATES:
            time.sleep(REFRESH_SECONDS)
            found = RunFolder.open(run).status()
            live.update(_screen(found), refresh=True)
    if "summary" in found:
        print(status_text(found))


def _screen(found: Mapping[str, Any]) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    services = Table("service", "pid", "state", "version", box=None, header_style="dim")
    for row in found["services"]:
        services.add_row(*(("" if row.get(key) is None else str(row[key])) for key in ("name", "pid", "state", "version")))
    shown = [(Text(name, style="dim"), value) for name, value in figures(found)]
    rows = (len(shown) + 1) // 2
    values = Table(box=None, show_header=False)
    for left, right in itertools.zip_longest(shown[:rows], shown[rows:], fillvalue=("", "")):  # all in the 24 lines of a terminal
        values.add_row(*left, *right)
    bar = ProgressBar(total=found.get("steps") or 1, completed=found["step"])
    says = [Text(line) for line in health(found) or ()]
    return Group(
        Text(_headline(found), style="bold"), bar, Text(""), services, Text(""), values, *says, Text("Ctrl-C leaves", style="dim")
    )
