"""Supervisor: brings the services up, watches them, ends them, and writes what became of the run.

    place ─▶ start (deadline) ─▶ run ─▶ wait ─┬─ trainer and rollouter done ─▶ finished
                                              ├─ a process died             ─▶ started again, or failed, by its name
                                              └─ stop, Ctrl-C, SIGTERM      ─▶ interrupted
                                     └─▶ stop in order (grace) ─▶ kill ─▶ sweep ─▶ summary.json

It runs in the launcher's process and knows processes only through `Runtime` (`runtime`); what is decided is in `verdict`
and `summary`, pure.
"""

from asyncrl.services.supervisor.runtime import Life, Resume, Row, RowFailed, Runtime, rows_of
from asyncrl.services.supervisor.supervisor import Supervisor

__all__ = ["Life", "Resume", "Row", "RowFailed", "Runtime", "Supervisor", "rows_of"]
