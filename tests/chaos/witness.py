"""What must hold of a run that has ended, whatever was killed meanwhile: read from its files, without asking any service."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.ledger.store import FILE_NAME, read_ledger
from asyncrl.messages import GroupId
from asyncrl.scheduling.learning_rate import learning_rate

ENDS = ("trained", "filtered", "failed", "expired")
SHOWN = 5  # of each kind of fault


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def faults(run_dir: Path) -> list[str]:
    """Everything that is wrong with a run that made its last step, in words; empty where all holds."""
    config = load_config(run_dir / "config.yaml").config
    return [*_steps(run_dir), *_groups(run_dir), *_learning_rates(run_dir, config), *_token_versions(run_dir, config)]


def _steps(run_dir: Path) -> list[str]:
    """Each step that the ledger finished stands once and in order in metrics.jsonl and in batches.jsonl, and no other does."""
    due = list(range(1, max((row.step for row in read_ledger(run_dir / FILE_NAME).steps), default=0) + 1))
    found = []
    for name in ("metrics.jsonl", "batches.jsonl"):
        steps = [line["step"] for line in lines(run_dir, name)]
        if steps != due:
            odd = [step for step, times in Counter([*steps, *due]).items() if times != 2] or steps
            found.append(f"{name}: the steps are not 1, 2, 3, … {len(due)}: see {odd[:SHOWN]}")
    return found


def _groups(run_dir: Path) -> list[str]:
    """Every (epoch, row) dispatched trained exactly once by the trainer's own log, or has exactly one reason, and all that under
    one attempt: those before it were issued again."""
    record = read_ledger(run_dir / FILE_NAME)
    trained = Counter(group for line in lines(run_dir, "batches.jsonl") for group in line["groups"])
    dispatched = {row.id for row in record.transitions if row.state == "dispatched"}
    ends: dict[GroupId, list[str]] = defaultdict(list)
    unexplained = []
    for row in record.transitions:
        if row.state in ENDS:
            ends[row.id].append(row.state)
            if row.state != "trained" and not row.reason:
                unexplained.append(f"{row.id} is {row.state} without a reason")
    replaced = {row.id._replace(attempt=row.id.attempt - 1) for row in record.reissues if row.id in dispatched}
    by_ledger = {str(id) for id, states in ends.items() if states == ["trained"]}
    final = Counter((id.epoch, id.row) for id in ends if id not in replaced)
    rows = {(id.epoch, id.row) for id in dispatched}
    kinds = (
        [f"{group} trained {times} times" for group, times in trained.items() if times > 1],
        [f"{group} trained by batches.jsonl, not by the ledger" for group in sorted(trained.keys() - by_ledger)],
        [f"{group} trained by the ledger, not by batches.jsonl" for group in sorted(by_ledger - trained.keys())],
        [f"{id} has {len(states)} ends: {states}" for id, states in ends.items() if len(states) > 1],
        [f"{id} was dispatched and has no end" for id in sorted(dispatched - ends.keys())],
        [f"{id} ended and was never dispatched" for id in sorted(ends.keys() - dispatched)],
        [f"{id} trained, and was issued again" for id in sorted(replaced) if "trained" in ends[id]],
        [f"row {epoch}/{row} ended under {final[epoch, row]} attempts" for epoch, row in sorted(rows) if final[epoch, row] != 1],
        unexplained,
    )
    return [fault for kind in kinds for fault in kind[:SHOWN]]


def _learning_rates(run_dir: Path, config: Config) -> list[str]:
    """At every step that of a run which nothing disturbed."""
    training, found = config.training, []
    for line in lines(run_dir, "metrics.jsonl"):
        due = learning_rate(
            line["step"],
            peak=training.learning_rate,
            total_steps=training.steps,
            warmup_steps=training.warmup_steps,
            schedule=training.schedule,
            final_factor=training.final_learning_rate_factor,
        )
        if line["learning_rate"] is None or abs(line["learning_rate"] - due) > 1e-12:
            found.append(f"step {line['step']}: the learning rate is {line['learning_rate']}, due is {due}")
    return found[:SHOWN]


def _token_versions(run_dir: Path, config: Config) -> list[str]:
    """No token past the bound trained, none of a version that was not there yet, and each step began at the version that its
    number says."""
    found = []
    for line in lines(run_dir, "batches.jsonl"):
        version, due, trained = line["version"], (line["step"] - 1) // config.training.publish_every, line["token_versions"]
        if version != due:
            found.append(f"step {line['step']} began at version {version}, due is {due}")
        if trained is not None and version - trained["min"] > config.rollout.staleness_limit:
            found.append(f"step {line['step']}, version {version}: a token of version {trained['min']} is past the bound")
    return found[:SHOWN]
