"""Bytes on their way to the disk, and errors of the operating system in words."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import CheckpointError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


def sync_tree(folder: Path) -> None:
    """Every file and folder below, and the folder itself, is on the disk when this returns. Raises OSError."""
    for path in (*walk(folder), folder):
        sync(path)


def walk(folder: Path) -> Iterator[Path]:
    """Files and folders below, contents before their folder. Raises OSError where a folder cannot be listed."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            yield from walk(entry)
        yield entry


def sync(path: Path) -> None:
    """fsync of one file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all, and on the disk: written aside, then renamed. Raises OSError."""
    aside = file.with_name(f".{file.name}.new")
    with aside.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)
    sync(file.parent)


def in_words(error: OSError, doing: str, folder: Path | str) -> CheckpointError:
    """What the system refused, and what to do about it. doing: such as ``a checkpoint is written``."""
    said = error.strerror or str(error)
    code = error.errno
    if code in NO_ROOM:
        fix = f"make room on the disk or quota that holds {folder}, or lower checkpoint.keep"
    elif code in NOT_ALLOWED:
        fix = f"give this user the right to read and write {folder}"
    elif code == errno.ENOENT:
        fix = f"leave {folder} alone while the run lives: something removed it"
    else:
        fix = f"look at the disk that holds {folder}"
    return CheckpointError(f"{doing} as a whole or not at all, and {error.filename or folder} gave {said!r}: {fix}")
