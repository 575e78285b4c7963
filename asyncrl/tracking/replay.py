"""Tell MLflow what a run's spool holds: ``python -m asyncrl.tracking.replay RUN [--uri URI]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.tracking.spool import FILE_NAME, read_spool
from asyncrl.tracking.store import MlflowStore, Store


def replay(run_dir: Path, *, uri: str | None = None, open_store: Callable[[str], Store] = MlflowStore) -> str:
    """The id of the MLflow run that now has everything. The spool is renamed when it is done, and left as it is when anything
    fails.

    uri: another store than the run's own; there the run is made anew. Raises UserError when there is no spool.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise UserError(f"{run_dir} has no {FILE_NAME}: everything that was logged has reached MLflow")
    spooled = read_spool(path)
    store = open_store(uri or spooled.facts.uri)
    run_id = spooled.run_id if uri is None and spooled.run_id is not None else store.create(spooled.facts)
    store.params(run_id, spooled.facts.params)
    for first in range(0, len(spooled.records), store.metrics_per_call):
        store.metrics(run_id, spooled.records[first : first + store.metrics_per_call])
    for artifact in spooled.artifacts:
        if artifact.exists():
            store.artifact(run_id, artifact)
    if spooled.status is not None and spooled.end_ms is not None:
        store.end(run_id, spooled.status, spooled.end_ms)
    path.rename(path.with_suffix(".replayed.jsonl"))
    return run_id


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.tracking.replay", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--uri", help="another MLflow store than the run's own")
    arguments = parser.parse_args()
    try:
        print(f"MLflow run {replay(arguments.run, uri=arguments.uri)} has everything now")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except Exception as error:  # boundary: the store is somebody else's machine, and may raise anything
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        kept = f"{arguments.run / FILE_NAME} is as it was: run this again once it answers, or name another store with --uri"
        parser.exit(1, f"error: MLflow did not take it: {what}\n{kept}\n")


if __name__ == "__main__":
    main()
