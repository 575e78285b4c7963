"""`audit`: the ledger against its witnesses, which of a live run are its own processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli.boundary import EXIT_FAILED
from asyncrl.cli.words import print_json
from asyncrl.errors import LedgerCorrupt, LedgerError, TransportError, UserError
from asyncrl.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.services.live_witness import RpcLiveWitness


def audit(run: Path, *, as_json: bool) -> int:
    """Exit code 1 for a ledger that does not balance."""
    from asyncrl.ledger.audit import audit as hold

    folder = RunFolder.open(run)
    try:
        report = hold(run, _witness(folder))
    except LedgerCorrupt:
        raise
    except LedgerError as error:
        raise UserError(f"{run} has no ledger to audit: {error}") from error
    if as_json:
        print_json(report.to_json())
    else:
        print(report.to_text())
    return 0 if report.ok else EXIT_FAILED


def _witness(folder: RunFolder) -> RpcLiveWitness | None:
    """The parts of a live run, once they are all up; None for a run that has ended."""
    if not folder.lives:
        return None
    try:
        book, door = folder.ask("book"), folder.door()
    except TransportError:
        return None
    if not all(name in book for name in ("rollouter", "reward", "message_queue")):
        return None
    from asyncrl.services.live_witness import RpcLiveWitness

    return RpcLiveWitness(
        rollouter=book["rollouter"]["rpc"],
        reward=book["reward"]["rpc"],
        message_queue=book["message_queue"]["rpc"],
        door=door,
    )
