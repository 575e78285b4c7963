"""Garbage, drawn from a seed: bytes that are nothing, values that are no message, and messages with something wrong in them."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import psutil

Frames = list[bytes]

INTERESTING: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, float("nan"), float("inf"), -1e308, "",
    "0/0/0", "0/0/0/0", "rollouts", "x" * 300, "\ud800", b"", b"\0" * 9, [], [[]], {}, {"a": 1}, {1: 2}, [0, 0, 0], [1.5],
    msgpack.ExtType(1, b"\x93\x01\xa2i4\x91\x01"), msgpack.ExtType(1, b""), msgpack.ExtType(7, b"?"), msgpack.Timestamp(1, 1),
    [None] * 20, [2**63] * 3,
)  # fmt: skip
RAW: tuple[bytes, ...] = (
    b"", b"\xc1", b"\x81\x91\x01\x01", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xd9\x05ab",
    b"\x91" * 400, b"\x91" * 1200 + b"\xc0", b"\x81\xa1a" * 600 + b"\xc0", b"\xa2\xc3\x28", b"\xff" * 8, b"\0" * 64,
)  # fmt: skip


class Garbage:
    """Multiparts made from `corpus`, which holds legal ones."""

    def __init__(self, seed: int, corpus: Sequence[Frames]):
        self.rng = random.Random(seed)
        self._corpus = [list(frames) for frames in corpus]
        self._ways: list[Callable[[], Frames]] = [self._noise, self._values, *[self._damaged] * 4, *[self._revalued] * 4]

    def frames(self) -> Frames:
        return self.rng.choice(self._ways)()

    def _noise(self) -> Frames:
        rng = self.rng
        return [rng.choice((rng.choice(RAW), rng.randbytes(rng.randrange(80)))) for _ in range(rng.randrange(1, 5))]

    def _values(self) -> Frames:
        return [pack(self.value()), *(self.rng.randbytes(self.rng.randrange(0, 64, 4)) for _ in range(self.rng.randrange(3)))]

    def _damaged(self) -> Frames:
        """A legal multipart with bytes changed, cut or added, or with frames dropped, doubled or exchanged."""
        rng, frames = self.rng, list(self.rng.choice(self._corpus))
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            if not frames:
                break
            place = rng.randrange(len(frames))
            frame = bytearray(frames[place])
            at = rng.randrange(len(frame) + 1)
            match rng.randrange(8):
                case 0 | 1 if frame:
                    frame[at - 1] ^= 1 << rng.randrange(8)
                case 2 if frame:
                    frame[at - 1] = rng.randrange(256)
                case 3:
                    del frame[at:]
                case 4:
                    frame[at:at] = rng.choice((rng.choice(RAW), rng.randbytes(rng.randrange(1, 9))))
                case 5:
                    other = rng.choice(rng.choice(self._corpus))
                    frame[at:] = other[rng.randrange(len(other) + 1) :]
                case 6:
                    frames.insert(rng.randrange(len(frames) + 1), bytes(frame))
                case 7:
                    del frames[rng.randrange(len(frames))]
                    continue
            frames[place] = bytes(frame)
        return frames

    def _revalued(self) -> Frames:
        """A legal multipart whose header says something else somewhere."""
        frames = list(self.rng.choice(self._corpus))
        place = next((number for number, frame in enumerate(frames) if _is_container(frame)), None)
        if place is None:
            return self._values()
        frames[place] = pack(self._changed(_unpack(frames[place])))
        return frames

    def _changed(self, value: Any) -> Any:
        rng = self.rng
        if rng.random() < 0.25 or not isinstance(value, (list, dict)) or not value:
            return self.value()
        if isinstance(value, dict):
            key = rng.choice(list(value))
            changed = {**value, key: self._changed(value[key])}
            if rng.random() < 0.2:
                del changed[key]
            return changed
        place, changed_list = rng.randrange(len(value)), list(value)
        match rng.randrange(6):
            case 0:
                del changed_list[place]
            case 1:
                changed_list.insert(place, self.value())
            case _:
                changed_list[place] = self._changed(value[place])
        return changed_list

    def value(self, depth: int = 0) -> Any:
        rng = self.rng
        if depth < 4 and rng.random() < 0.2:
            items = [self.value(depth + 1) for _ in range(rng.randrange(4))]
            return items if rng.random() < 0.5 else {str(number): item for number, item in enumerate(items)}
        return rng.choice((rng.choice(INTERESTING), rng.randrange(-100, 2**16), rng.random(), rng.randbytes(rng.randrange(9))))


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def resident_bytes(process: psutil.Process | None = None) -> int:
    """Memory that this process, or another, holds now."""
    gc.collect()
    return int((process or psutil.Process()).memory_info().rss)


def _is_container(frame: bytes) -> bool:
    return bool(frame) and (0x80 <= frame[0] <= 0x9F or 0xDC <= frame[0] <= 0xDF)


def _unpack(frame: bytes) -> Any:
    return msgpack.unpackb(frame, strict_map_key=False, unicode_errors="surrogatepass")
