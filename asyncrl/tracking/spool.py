"""mlflow_spool.jsonl: what MLflow could not be told while the run went on, for `asyncrl.tracking.replay`.

One JSON object a line, by ``kind``:
    run      {"uri", "experiment", "run_id": text or null, "run_name", "params", "tags", "start_ms"}     first
    metrics  {"records": [[name, value, milliseconds since the epoch, step], …]}                         any number
    end      {"run_id", "status": "FINISHED" | "FAILED" | "KILLED", "artifacts": [paths], "end_ms"}      last
A record may have reached MLflow all the same; telling it again changes nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

FILE_NAME = "mlflow_spool.jsonl"
EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


class Record(NamedTuple):
    """One value of one metric. `milliseconds` since the epoch."""

    name: str
    value: float
    milliseconds: int
    step: int


@dataclass(frozen=True)
class RunFacts:
    """What a run is created from."""

    uri: str
    experiment: str
    run_name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    start_ms: int


@dataclass(frozen=True)
class Spooled:
    """A whole spool, read. `status` is None when the run did not get as far as its end."""

    facts: RunFacts
    run_id: str | None
    records: list[Record]
    status: EndStatus | None
    artifacts: list[Path]
    end_ms: int | None


class Spool:
    """Appends to a run's spool; the file is made by the first write."""

    def __init__(self, run_dir: Path, facts: RunFacts):
        self.path = run_dir / FILE_NAME
        self._facts = facts

    def metrics(self, records: Sequence[Record], run_id: str | None) -> None:
        if records:
            self._write(run_id, {"kind": "metrics", "records": [list(record) for record in records]})

    def end(self, run_id: str | None, status: EndStatus, artifacts: Sequence[Path], end_ms: int) -> None:
        paths = [str(path) for path in artifacts]
        self._write(run_id, {"kind": "end", "run_id": run_id, "status": status, "artifacts": paths, "end_ms": end_ms})

    def _write(self, run_id: str | None, line: Mapping[str, Any]) -> None:
        begins = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if begins:
                file.write(json.dumps({"kind": "run", "run_id": run_id, **asdict(self._facts)}) + "\n")
            file.write(json.dumps(line) + "\n")


def read_spool(path: Path) -> Spooled:
    """Raises ValueError for a file that is no spool. A last line cut short by a crash is left out."""
    lines = [line for line in map(_parsed, path.read_text(encoding="utf-8").splitlines()) if line is not None]
    if not lines or lines[0].get("kind") != "run":
        raise ValueError(f"{path} is not a spool of metrics: its first line must be the run")
    head = lines[0]
    facts = RunFacts(**{name: head[name] for name in RunFacts.__dataclass_fields__})
    ends = [line for line in lines if line["kind"] == "end"]
    end = ends[-1] if ends else {}
    return Spooled(
        facts=facts,
        run_id=end.get("run_id") or head["run_id"],
        records=[Record(*record) for line in lines if line["kind"] == "metrics" for record in line["records"]],
        status=end.get("status"),
        artifacts=[Path(text) for text in end.get("artifacts", [])],
        end_ms=end.get("end_ms"),
    )


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
