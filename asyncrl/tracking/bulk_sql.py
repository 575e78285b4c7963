"""Metrics straight into the tables of an MLflow SQLite file.

MLflow's own call makes an object of every value, several times over: 0.2 ms of processor time each. Here a call is two
statements of the driver, with the same rows in ``metrics`` and ``latest_metrics`` at its end: a row that is there already is left
as it is, and the latest of a metric is the one with the greatest (step, timestamp, value). One writer per run. Rows go in sorted
by name, as the tables' keys begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from asyncrl.tracking.spool import Record

COLUMNS = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")  # of both tables, as far as we know them
INSERT = f"INSERT OR {{}} INTO {{}} ({', '.join(COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?)"
LARGEST = 1.7976931348623157e308  # what MLflow stores for an infinite value

Row = tuple[str, float, int, int, bool, str]
Age = tuple[int, int, float]


class BulkSql:
    """Writes to the store of one client. `fits` says whether it can."""

    def __init__(self, store: Any):
        from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric

        self._store = store
        self._metrics, self._latest_metrics = SqlMetric.__table__, SqlLatestMetric.__table__
        self._latest: dict[str, dict[str, Age]] = {}  # by run and key, as the table has them

    @property
    def fits(self) -> bool:
        """It is a SQLite file, and its tables are those written for."""
        tables = (self._metrics, self._latest_metrics)
        engine = getattr(self._store, "engine", None)
        return (
            engine is not None
            and engine.dialect.name == "sqlite"
            and hasattr(self._store, "ManagedSessionMaker")
            and all({column.name for column in table.columns} == set(COLUMNS) for table in tables)
        )

    def write(self, run_id: str, records: Sequence[Record]) -> None:
        """In one transaction. Raises what SQLite raises, with nothing written; may be called again with the same records."""
        rows = [_row(run_id, record) for record in sorted(records, key=itemgetter(0))]
        with self._store.ManagedSessionMaker(read_only=False) as session:
            latest = dict(self._latest[run_id]) if run_id in self._latest else self._read_latest(session, run_id)
            newer: dict[str, Row] = {}
            for row in rows:
                key, value, timestamp, step, _, _ = row
                age, known = (step, timestamp, value), latest.get(key)
                if known is None or age > known:
                    latest[key], newer[key] = age, row
            driver = session.connection()
            driver.exec_driver_sql(INSERT.format("IGNORE", self._metrics.name), rows)
            if newer:
                driver.exec_driver_sql(INSERT.format("REPLACE", self._latest_metrics.name), list(newer.values()))
        self._latest[run_id] = latest

    def _read_latest(self, session: Any, run_id: str) -> dict[str, Age]:
        table = self._latest_metrics
        found = session.execute(table.select().where(table.c.run_uuid == run_id)).mappings()
        return {row["key"]: (row["step"], row["timestamp"], row["value"]) for row in found}


def _row(run_id: str, record: Record) -> Row:
    """As MLflow writes it: not a number is 0 with a mark, infinity is the largest number."""
    key, value, milliseconds, step = record
    is_nan = value != value
    return key, 0.0 if is_nan else max(-LARGEST, min(LARGEST, value)), milliseconds, step, is_nan, run_id
