"""What must hold of a run that has ended, whatever was killed meanwhile: read from its files, without asking any service."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.ledger.store import FILE_NAME, read_ledger
from asyncrl.scheduling.learning_rate import learning_rate

ENDS = ("trained", "filtered", "failed", "expired")


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def faults(run_dir: Path, *, finished: bool = True) -> list[str]:
    """Everything that is wrong with the run, in words; empty where all holds."""
    return [*_steps(run_dir), *_groups(run_dir, finished=finished), *_learning_rates(run_dir)]


def _steps(run_dir: Path) -> list[str]:
    """Each step stands once and in order in metrics.jsonl and in batches.jsonl."""
    found = []
    for name in ("metrics.jsonl", "batches.jsonl"):
        steps = [line["step"] for line in lines(run_dir, name)]
        if steps != list(range(1, len(steps) + 1)):
            odd = [step for step, times in Counter(steps).items() if times > 1] or steps[:5]
            found.append(f"{name}: the steps are not 1, 2, 3, …: {odd[:5]} of {len(steps)}")
    return found


def _groups(run_dir: Path, *, finished: bool) -> list[str]:
    """Every (epoch, row) dispatched trained exactly once, or has exactly one reason, and no two attempts did."""
    found = []
    trained = Counter(group for line in lines(run_dir, "batches.jsonl") for group in line["groups"])
    found += [f"{group} trained {times} times" for group, times in trained.items() if times > 1]
    ends: dict[str, list[str]] = {}
    dispatched: set[str] = set()
    record = read_ledger(run_dir / FILE_NAME)
    for row in record.transitions:
        if row.state == "dispatched":
            dispatched.add(str(row.id))
        if row.state in ENDS:
            ends.setdefault(str(row.id), []).append(row.state)
    reissued = {f"{row.id.epoch}/{row.id.row}/{row.id.attempt - 1}" for row in record.reissues}
    found += [f"{group} has {len(states)} ends: {states}" for group, states in ends.items() if len(states) > 1]
    by_ledger = {group for group, states in ends.items() if states == ["trained"]}
    found += [f"{group} trained by batches.jsonl, not by the ledger" for group in sorted(set(trained) - by_ledger)[:5]]
    found += [f"{group} trained by the ledger, not by batches.jsonl" for group in sorted(by_ledger - set(trained))[:5]]
    rows = Counter(group.rsplit("/", 1)[0] for group in ends if group not in reissued)
    found += [f"{row} ended under {times} attempts" for row, times in rows.items() if times > 1]
    if finished:
        found += [f"{group} was dispatched and has no end" for group in sorted(dispatched - set(ends))[:5]]
    return found


def _learning_rates(run_dir: Path) -> list[str]:
    """At every step that of a run which nothing disturbed."""
    training = load_config(run_dir / "config.yaml").config.training
    found = []
    for line in lines(run_dir, "metrics.jsonl"):
        due = learning_rate(
            line["step"],
            peak=training.learning_rate,
            total_steps=training.steps,
            warmup_steps=training.warmup_steps,
            schedule=training.schedule,
            final_factor=training.final_learning_rate_factor,
        )
        if abs(line["learning_rate"] - due) > 1e-12:
            found.append(f"step {line['step']}: the learning rate is {line['learning_rate']}, due is {due}")
    return found[:5]
