"""An MLflow store, in the few calls that a run needs. Opening one imports mlflow: seconds, so on a background thread."""

from __future__ import annotations

import fcntl
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from asyncrl.tracking.bulk_sql import BulkSql
from asyncrl.tracking.spool import EndStatus, Record, RunFacts

PARAMS_PER_CALL = 100  # MLflow's limits
METRICS_PER_CALL = 1000
METRICS_PER_BULK = 20_000
OPEN_SECONDS = 60.0


class Store(Protocol):
    """Every call may raise anything, or hang: a server is somebody else's machine. `metrics_per_call`: the most one takes."""

    metrics_per_call: int

    def create(self, facts: RunFacts) -> str:
        """Create the run, with its tags; its id."""

    def reopen(self, run_id: str) -> bool:
        """A run that had ended goes on; False where the store has no such run."""

    def params(self, run_id: str, params: Mapping[str, str]) -> None:
        """May be called again with the same values."""

    def metrics(self, run_id: str, records: Sequence[Record]) -> None:
        """At most `metrics_per_call`."""

    def artifact(self, run_id: str, path: Path) -> None: ...

    def end(self, run_id: str, status: EndStatus, end_ms: int) -> None: ...


class MlflowStore:
    """The real one."""

    def __init__(self, uri: str):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if uri.startswith(("http://", "https://")):  # MLflow's own defaults try for many minutes
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module=r"alembic\.")  # about MLflow's own tables: nothing that a user could mend
        self._uri = uri
        with _one_at_a_time(uri):
            self._client: Any = MlflowClient(tracking_uri=uri)
            self._bulk = _bulk_sql(self._client) if uri.startswith("sqlite:") else None
        self.metrics_per_call = METRICS_PER_CALL if self._bulk is None else METRICS_PER_BULK

    def create(self, facts: RunFacts) -> str:
        run = self._client.create_run(
            self._experiment(facts.experiment), start_time=facts.start_ms, tags=dict(facts.tags), run_name=facts.run_name
        )
        run_id: str = run.info.run_id
        return run_id

    def reopen(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        if found.info.lifecycle_stage == "deleted":
            return False
        self._client.update_run(run_id, status="RUNNING")
        return True

    def params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entries = [Param(key, value) for key, value in params.items()]
        for first in range(0, len(entries), PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=entries[first : first + PARAMS_PER_CALL])

    def metrics(self, run_id: str, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        assert len(records) <= self.metrics_per_call, len(records)
        if self._bulk is not None:
            self._bulk.write(run_id, records)
            return
        self._client.log_batch(run_id, metrics=[Metric(r.name, r.value, r.milliseconds, r.step) for r in records])

    def artifact(self, run_id: str, path: Path) -> None:
        self._client.log_artifact(run_id, str(path))

    def end(self, run_id: str, status: EndStatus, end_ms: int) -> None:
        self._client.set_terminated(run_id, status=status, end_time=end_ms)

    def _experiment(self, name: str) -> str:
        """Its id; made when there is none. Another run may make it at the same moment."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                made: str = self._client.create_experiment(name, artifact_location=artifact_location(self._uri, name))
                return made
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        experiment_id: str = found.experiment_id
        return experiment_id


@contextmanager
def _one_at_a_time(uri: str) -> Iterator[None]:
    """Runs that start beside each other on a new SQLite file would all make its tables, and all but one fail. The lock lies on
    the file itself (flock, which SQLite does not use), and is waited for OPEN_SECONDS long."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    with Path(uri.removeprefix("sqlite:///")).open("ab") as file:
        deadline = time.monotonic() + OPEN_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def _bulk_sql(client: Any) -> BulkSql | None:
    """The short way into a SQLite file, where this MLflow's insides are those that it was written for."""
    tracking = getattr(client, "_tracking_client", None)
    if tracking is None or not hasattr(tracking, "store"):
        return None
    bulk = BulkSql(tracking.store)
    return bulk if bulk.fits else None


def artifact_location(uri: str, experiment: str) -> str | None:
    """For a SQLite file, an absolute folder ``mlruns`` beside it, so that `mlflow ui` finds the artifacts from anywhere;
    else the server's own choice (None)."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlruns" / experiment).as_uri()


def absolute_uri(uri: str) -> str:
    """A relative SQLite path or folder means the working directory of the launch, whichever directory is current later."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def ui_command(uri: str) -> str:
    """What shows this store to a person."""
    return uri if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {uri}"
