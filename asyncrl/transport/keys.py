"""The keys of one launch of a run: made by its launcher, kept in files that their owner alone may read, gone at its end.

    <run_dir>/keys/            0700
        client.json            0600    what one needs to call: the server's public key, the client's pair, the token of HTTP
        server.json            0600    what one needs to serve besides: the server's secret key

Files that others may read or change are not used. Loaded inside server processes too: zmq is all that it needs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from asyncrl.errors import TransportError, UserError

FOLDER = "keys"
_CLIENT_FILE, _SERVER_FILE = "client.json", "server.json"
_CLIENT_FIELDS, _SERVER_FIELDS = ("server_public", "client_public", "client_secret", "token"), ("server_secret",)
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Keys:
    """CURVE's are in Z85 (40 characters); `server_secret` is None for one who only calls."""

    server_public: str
    client_public: str
    client_secret: str = field(repr=False)
    token: str = field(repr=False)
    server_secret: str | None = field(default=None, repr=False)


def new_keys() -> Keys:
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    return Keys(server_public, client_public, client_secret, secrets.token_urlsafe(32), server_secret)


def make_keys(run_dir: Path) -> Keys:
    """New keys in their files; those of an earlier launch are gone. Raises UserError where files cannot be kept from others."""
    remove_keys(run_dir)
    keys, folder = new_keys(), run_dir / FOLDER
    try:
        folder.mkdir(mode=0o700)
        for name, fields in ((_CLIENT_FILE, _CLIENT_FIELDS), (_SERVER_FILE, _SERVER_FIELDS)):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({part: getattr(keys, part) for part in fields}, file)
    except OSError as error:
        raise UserError(
            f"the run's keys cannot be written to {folder} ({error.strerror or error}): choose a --run-dir that you may write to"
        ) from error
    return read_keys(run_dir, serves=True)


def remove_keys(run_dir: Path) -> None:
    """Where there are any."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def read_keys(run_dir: Path, *, serves: bool) -> Keys:
    """Those of the run's present launch. Raises UserError where they may not be read, or others may read them, TransportError
    where they are gone."""
    folder = run_dir / FOLDER
    _read(folder, os.O_DIRECTORY)
    told: dict[str, str] = {}
    for name, fields in ((_CLIENT_FILE, _CLIENT_FIELDS), *([(_SERVER_FILE, _SERVER_FIELDS)] if serves else [])):
        try:
            found = json.loads(_read(folder / name))
            told |= {part: str(found[part]) for part in fields}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / name} holds no keys ({error}): end the run and launch it again") from error
    return Keys(**told)


def _read(path: Path, flags: int = 0) -> bytes:
    """The bytes of a file that its owner alone may read; of a folder, none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
    except FileNotFoundError:
        raise TransportError(f"the run's keys are gone ({path}): it has ended, or is about to") from None
    except OSError as error:
        raise UserError(
            "this run is reached beyond loopback, with keys that their owner alone may read, and you may not read "
            f"{path} ({error.strerror}): do this as the user who launched it"
        ) from error
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & 0o077:
            raise UserError(
                f"{path} may be read or changed by others (mode {mode:o}), so the run's keys are not safe: end the run, choose a "
                "--run-dir on a file system that keeps permissions, and launch again"
            )
        return b"" if flags & os.O_DIRECTORY else os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
