"""The witness of the chaos tests finds each fault that it looks for: shown on copies of a healthy run that somebody altered."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config
from asyncrl.ledger.record import FILE_NAME, read_ledger
from asyncrl.simulation.simulate import World, simulate
from tests.chaos.witness import ENDS, faults, lines
from tests.services.rollouter_parts import make_config
from tests.simulation.test_simulate import coin, tenfold_for_half_of_the_rows

STEPS = 30
ROUGH = World(
    token_seconds=0.05,
    num_tokens=tenfold_for_half_of_the_rows,
    reward=lambda item: None if coin(item["response"], 8) == 0 else float(coin(item["response"], 4) == 1),
    step_seconds=lambda batch: 0.3,
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with groups of every end, and with reissues."""
    run_dir = tmp_path_factory.mktemp("runs") / "healthy"
    run_dir.mkdir()
    config = make_config(
        rollout={"max_response_tokens": 80, "max_staleness": 1, "on_stale": "reissue", "quarantine_after": 0},
        training={"steps": STEPS, "groups_per_step": 2, "schedule": "linear", "learning_rate": 0.5},
        queue={"durability": "process"},
    )
    simulate(config, run_dir, prompts=[f"prompt {row}" for row in range(60)], world=ROUGH)
    (run_dir / "config.yaml").write_text(dump_config(config))
    return run_dir


@pytest.fixture
def altered(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def test_a_healthy_run_with_every_kind_of_end_has_no_fault(healthy: Path) -> None:
    record = read_ledger(healthy / FILE_NAME)
    assert {row.state for row in record.transitions} >= set(ENDS)
    assert record.reissues
    assert len(lines(healthy, "metrics.jsonl")) == STEPS
    assert faults(healthy) == []


# ---- the trainer's files ---------------------------------------------------------------------------------------

Lines = list[dict[str, Any]]


def twice(found: Lines) -> Lines:
    return [*found[:5], found[4], *found[5:]]


def without_one(found: Lines) -> Lines:
    return [*found[:7], *found[8:]]


def cut(found: Lines) -> Lines:
    return found[:-1]


def one_too_many(found: Lines) -> Lines:
    return [*found, {**found[-1], "step": STEPS + 1}]


def swapped(found: Lines) -> Lines:
    return [found[1], found[0], *found[2:]]


@pytest.mark.parametrize("name", ["metrics.jsonl", "batches.jsonl"])
@pytest.mark.parametrize("change", [twice, without_one, cut, one_too_many, swapped])
def test_a_step_that_is_missing_doubled_invented_or_out_of_order_is_found(altered: Path, name: str, change) -> None:
    write(altered, name, change)
    assert any(fault.startswith(f"{name}: the steps are not") for fault in faults(altered))


def rate(value: Any) -> Callable[[Lines], Lines]:
    return lambda found: [*found[:9], {**found[9], "learning_rate": value}, *found[10:]]


@pytest.mark.parametrize("value", [0.5, None])
def test_a_learning_rate_that_is_another_is_found(altered: Path, value: Any) -> None:
    write(altered, "metrics.jsonl", rate(value))
    (found,) = faults(altered)
    assert found.startswith(f"step 10: the learning rate is {value}, due is 0.35")


def test_a_schedule_that_began_anew_in_the_middle_is_found(altered: Path) -> None:
    def begun_anew(found: Lines) -> Lines:
        rates = [line["learning_rate"] for line in found]
        return [{**line, "learning_rate": rates[at % 15]} for at, line in enumerate(found)]

    write(altered, "metrics.jsonl", begun_anew)
    assert any("the learning rate is" in fault for fault in faults(altered))


def test_a_group_that_trained_in_two_steps_is_found(altered: Path) -> None:
    group = a_trained(altered)
    write(altered, "batches.jsonl", lambda found: [*found[:-1], {**found[-1], "groups": [*found[-1]["groups"], group]}])
    assert f"{group} trained 2 times" in faults(altered)


def test_a_group_that_only_the_ledger_or_only_the_trainer_calls_trained_is_found(altered: Path) -> None:
    group = a_trained(altered)
    write(
        altered, "batches.jsonl", lambda found: [{**line, "groups": [g for g in line["groups"] if g != group]} for line in found]
    )
    assert faults(altered) == [f"{group} trained by the ledger, not by batches.jsonl"]
    other = an_ended(altered, "filtered")
    write(altered, "batches.jsonl", lambda found: [{**found[0], "groups": [*found[0]["groups"], group, other]}, *found[1:]])
    assert faults(altered) == [f"{other} trained by batches.jsonl, not by the ledger"]


def test_a_token_past_the_bound_and_a_step_of_another_version_are_found(altered: Path) -> None:
    def older(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "token_versions": {"min": line["version"] - 2, "max": line["version"]}}

    write(altered, "batches.jsonl", lambda found: [*found[:9], older(found[9]), *found[10:]])
    assert faults(altered) == ["step 10, version 9: a token of version 7 is past the bound"]
    write(altered, "batches.jsonl", lambda found: [*found[:20], {**found[20], "version": 19}, *found[21:]])
    assert "step 21 began at version 19, due is 20" in faults(altered)


# ---- the ledger ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ENDS)
def test_an_attempt_without_its_end_is_found(altered: Path, state: str) -> None:
    group = an_ended(altered, state)
    change_ledger(altered, f"DELETE FROM transitions WHERE {is_(group)} AND state = '{state}'")
    assert f"{group} was dispatched and has no end" in faults(altered)


@pytest.mark.parametrize("state", ENDS)
def test_a_second_end_of_an_attempt_is_found(altered: Path, state: str) -> None:
    group = an_ended(altered, state)
    change_ledger(
        altered, f"{COPY} SELECT seq, epoch, row, attempt, 'failed', 'again', step, version, wall_time {FROM} {is_(group)} {LAST}"
    )
    assert f"{group} has 2 ends: ['{state}', 'failed']" in faults(altered)


@pytest.mark.parametrize("state", [state for state in ENDS if state != "trained"])
def test_an_end_without_a_reason_is_found(altered: Path, state: str) -> None:
    group = an_ended(altered, state)
    change_ledger(altered, f"UPDATE transitions SET reason = '' WHERE {is_(group)} AND state = '{state}'")
    assert faults(altered) == [f"{group} is {state} without a reason"]


def test_a_row_that_ended_under_two_attempts_is_found(altered: Path) -> None:
    group = a_trained(altered)
    epoch, row, _ = group.split("/")
    for state in ("dispatched", "failed"):
        values = f"seq, epoch, row, attempt + 1, '{state}', 'again', NULL, version, wall_time"
        change_ledger(altered, f"{COPY} SELECT {values} {FROM} {is_(group)} {LAST}")
    assert faults(altered) == [f"row {epoch}/{row} ended under 2 attempts"]


def test_a_group_that_trained_and_was_issued_again_is_found(altered: Path) -> None:
    group = a_trained(altered)
    for state in ("dispatched", "failed"):
        values = f"seq, epoch, row, attempt + 1, '{state}', 'again', NULL, version, wall_time"
        change_ledger(altered, f"{COPY} SELECT {values} {FROM} {is_(group)} {LAST}")
    change_ledger(altered, f"INSERT INTO reissues SELECT seq, epoch, row, attempt + 1, wall_time {FROM} {is_(group)} {LAST}")
    assert faults(altered) == [f"{group} trained, and was issued again"]


def test_a_row_that_is_in_no_place_at_all_is_found(altered: Path) -> None:
    """Its attempts were issued again, one after the other, and the last is gone."""
    last = next(row.id for row in reversed(read_ledger(altered / FILE_NAME).reissues))
    change_ledger(altered, f"DELETE FROM transitions WHERE {is_(str(last))} AND state != 'dispatched'")
    assert f"row {last.epoch}/{last.row} ended under 0 attempts" in faults(altered)


def test_an_end_of_what_was_never_dispatched_is_found(altered: Path) -> None:
    group = an_ended(altered, "filtered")
    change_ledger(altered, f"DELETE FROM transitions WHERE {is_(group)} AND state = 'dispatched'")
    assert faults(altered) == [f"{group} ended and was never dispatched"]


# ---- altering --------------------------------------------------------------------------------------------------

COPY, FROM, LAST = "INSERT INTO transitions", "FROM transitions WHERE", "ORDER BY seq DESC LIMIT 1"


def write(run_dir: Path, name: str, change: Callable[[Lines], Lines]) -> None:
    (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in change(lines(run_dir, name))))


def change_ledger(run_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(run_dir / FILE_NAME)) as file:
        assert file.execute(statement).rowcount > 0, statement
        file.commit()


def is_(group: str) -> str:
    epoch, row, attempt = group.split("/")
    return f"epoch = {epoch} AND row = {row} AND attempt = {attempt}"


def an_ended(run_dir: Path, state: str) -> str:
    """A group with this end that nobody issued again."""
    record = read_ledger(run_dir / FILE_NAME)
    replaced = {row.id._replace(attempt=row.id.attempt - 1) for row in record.reissues}
    ids = [row.id for row in record.transitions if row.state == state]
    return str(next((id for id in ids if id not in replaced), ids[0]))


def a_trained(run_dir: Path) -> str:
    return an_ended(run_dir, "trained")
