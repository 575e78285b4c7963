"""Append-only files of records, and places in them. Knows nothing of messages.

    00000007.segment    record record record …        record: "AJ01", size, CRC-32 (12 bytes), then `size` bytes

One segment is written to; when it is full the next begins, and no file that was found is ever appended to, so that a torn end
stays where it is. A place that does not hold the record it names is wrong (`WrongRecord`): torn, overwritten, or rotten.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import AsyncrlError, StorageFailed
from asyncrl.protocols.journal import Place
from asyncrl.transport.blocks import Payload

SEGMENT_BYTES = 32 * 2**20
SUFFIX = ".segment"
_HEADER = struct.Struct("<4sII")
_MAGIC = b"AJ01"
HEADER_BYTES = _HEADER.size
_VECTORS = 1000  # most buffers to one write; the system takes 1024
_OPEN = 64  # most files open to be read


class WrongRecord(AsyncrlError):
    """This place does not hold the record it should."""


class Segments:
    """The files of one folder. One writer. Raises StorageFailed when the disk refuses, naming the folder and the fix."""

    def __init__(self, folder: Path, *, power: bool, segment_bytes: int | None = None):
        """Open the folder, creating it; what lies in it stays until `drop`. `power`: what `sync` returns from survives a power
        cut."""
        self.folder = folder
        self.segment_bytes = segment_bytes or SEGMENT_BYTES
        self._power = power
        self._descriptors: dict[int, int] = {}
        self._size = 0
        self._unsynced: set[int] = set()
        self._new_file = False
        with self._naming():
            folder.mkdir(parents=True, exist_ok=True)
            self.found = sorted(int(path.stem) for path in folder.glob("*" + SUFFIX) if path.stem.isdigit())
        self.active = (self.found[-1] if self.found else 0) + 1

    def append(self, payloads: Sequence[Payload]) -> list[Place]:
        """Write these payloads, in order; they survive this process when the call returns."""
        places: list[Place] = []
        buffers: list[Payload] = []
        size = 0
        for payload in payloads:
            if self._size + size >= self.segment_bytes and self._size + size > 0:
                self._write(buffers, size)
                buffers, size = [], 0
                self._roll()
            checksum = zlib.crc32(payload)
            places.append(Place(self.active, self._size + size, len(payload), checksum))
            buffers += (_HEADER.pack(_MAGIC, len(payload), checksum), payload)
            size += HEADER_BYTES + len(payload)
        self._write(buffers, size)
        return places

    def sync(self) -> None:
        """Under `power`: everything appended survives a power cut when the call returns."""
        if not self._power:
            return
        with self._naming():
            for segment in self._unsynced:
                os.fdatasync(self._descriptors[segment])
            if self._new_file:
                _sync_folder(self.folder)
        self._unsynced.clear()
        self._new_file = False

    def read(self, place: Place) -> bytes:
        """The payload at this place. Raises WrongRecord when another lies there, or none."""
        try:
            record = os.pread(self._descriptor(place.segment), HEADER_BYTES + place.size, place.offset)
        except FileNotFoundError as error:
            raise WrongRecord(f"segment {place.segment} is gone") from error
        except OSError as error:
            raise WrongRecord(f"segment {place.segment} cannot be read: {error.strerror}") from error
        if len(record) < HEADER_BYTES + place.size:
            raise WrongRecord(f"segment {place.segment} ends {HEADER_BYTES + place.size - len(record)} bytes too early")
        payload = record[HEADER_BYTES:]
        if record[:HEADER_BYTES] != _HEADER.pack(_MAGIC, place.size, place.checksum):
            raise WrongRecord(f"segment {place.segment} has another record at byte {place.offset}")
        if zlib.crc32(payload) != place.checksum:
            raise WrongRecord(f"segment {place.segment} has a record at byte {place.offset} whose checksum is wrong")
        return payload

    def drop(self, segments: Iterable[int]) -> None:
        """Delete these files; one that is gone already is no matter."""
        for segment in segments:
            descriptor = self._descriptors.pop(segment, None)
            with self._naming():
                if descriptor is not None:
                    os.close(descriptor)
                self._path(segment).unlink(missing_ok=True)
            self._unsynced.discard(segment)

    def num_bytes(self) -> int:
        """Bytes that the files take."""
        return sum(path.stat().st_size for path in self.folder.glob("*" + SUFFIX))

    def close(self) -> None:
        """Let go of the files. Closing twice is harmless."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, buffers: Sequence[Payload], size: int) -> None:
        if not buffers:
            return
        with self._naming():
            descriptor = self._open_active()
            for start in range(0, len(buffers), _VECTORS):
                _write_all(descriptor, buffers[start : start + _VECTORS])
        self._size += size
        if self._power:
            self._unsynced.add(self.active)

    def _open_active(self) -> int:
        descriptor = self._descriptors.get(self.active)
        if descriptor is None:
            if len(self._descriptors) >= _OPEN:
                self._close_some()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            descriptor = self._descriptors[self.active] = os.open(self._path(self.active), flags, 0o600)
            self._new_file = True
        return descriptor

    def _roll(self) -> None:
        self.active += 1
        self._size = 0

    def _descriptor(self, segment: int) -> int:
        descriptor = self._descriptors.get(segment)
        if descriptor is None:
            if len(self._descriptors) >= _OPEN:
                self._close_some()
            descriptor = self._descriptors[segment] = os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC)
        return descriptor

    def _close_some(self) -> None:
        for segment in [segment for segment in self._descriptors if segment not in {self.active, *self._unsynced}]:
            os.close(self._descriptors.pop(segment))

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}{SUFFIX}"

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageFailed(
                f"the queue's journal in {self.folder} cannot be written: {error.strerror or error}: free space or mend access "
                "there, or name another place in cluster.state_dir"
            ) from error


def _write_all(descriptor: int, buffers: Sequence[Payload]) -> None:
    """All bytes of all buffers: the system may take a part only, before it says why."""
    left = sum(map(len, buffers))
    written = os.writev(descriptor, buffers)
    if written < left:
        rest = memoryview(b"".join(buffers))
        while written < left:
            written += os.write(descriptor, rest[written:])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
