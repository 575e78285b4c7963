"""Logging: one file per service under the run directory, one format, and the tail of it for error messages."""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def log_path(run_dir: Path, service: str) -> Path:
    """`logs/<service>.log`; the slash of a row name such as ``reward/0`` becomes a dash."""
    return run_dir / "logs" / f"{service.replace('/', '-')}.log"


def log_to_file(run_dir: Path, service: str, level: int = logging.INFO) -> Path:
    """Send this process's log records, uncaught faults and native crash traces to the service's file."""
    path = log_path(run_dir, service)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "urllib3", "filelock", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    assert handler.stream is not None, "opened at once"
    faulthandler.enable(handler.stream)
    sys.excepthook = lambda kind, value, trace: root.critical("uncaught", exc_info=(kind, value, trace))
    return path


def copy_to_file(run_dir: Path, service: str) -> Callable[[], None]:
    """Also write asyncrl's own records of this process to the service's file, and leave the process's logging as it is: for the
    launcher, which may be a user's program. The returned function ends it."""
    path = log_path(run_dir, service)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, delay=True)
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("asyncrl")
    logger.addHandler(handler)

    def end() -> None:
        logger.removeHandler(handler)
        handler.close()

    return end


class _LogFile(logging.FileHandler):
    """A full disk, or a folder that went away, costs lines of the log, never the work that wrote them."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # raised by the opening, which may come late
            super().emit(record)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def tail(run_dir: Path, service: str, lines: int = 8) -> list[str]:
    """The last lines of a service's log, oldest first; empty when there is none."""
    path = log_path(run_dir, service)
    if not path.exists():
        return []
    with path.open("rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - 16_384))
        return stream.read().decode(errors="replace").splitlines()[-lines:]
