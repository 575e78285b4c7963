"""What brokers and clients write to each other: a frame with the msgpack list [kind, …], and the payloads in one frame.

    sender → broker     sender(topic, producer, beat)   here I am, every few seconds; `beat` is echoed in `progress`
                        announce(topic, first, sizes)   messages number `first` on wait, of these sizes in bytes
                        write(topic, first, [[message_id, group_id], …], sizes) + payloads    announces what was not
                        close(topic)                    end of this sender's stream
    broker → sender     progress(beat, announced, granted, handled, capacity_bytes)    counts; beat 0: of the broker's own accord
                        failed(number, kind, text)      this message was refused
                        closed()
    receiver → broker   receiver(topic, beat)           here I am; echoed in `beat`
                        take(topic, request, max_items, received)      `received`: number of the last delivery that came
                        cancel(topic, request)          answer it now, if need be with nothing
                        lost(topic, received)           deliveries after this one did not come; numbered anew
                        settle(topic, message_ids)      done with
                        refuse(topic, message_id, reason)              its payload is no message
                        leave(topic)                    gives its leases back
    broker → receiver   deliver(delivery, request, [[message_id, redelivered], …], sizes) + payloads
                        end(request)                    the typed end of stream
                        beat(beat, open request or 0, last delivery)
                        left()
    broker → any        error(kind, text)               what came could not be served

Payloads of one write lie end to end in the second frame, their sizes in the first: a frame each would cost more than the copy.
All counts are cumulative, so a lost or repeated frame is seen at the next beat and mended by saying it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgpack

from asyncrl.errors import MalformedFrame, OversizedFrame, TruncatedFrame, UnknownTag

MAX_BODY_BYTES = 64 * 10**6
MAX_ID_CHARACTERS = 256

_COUNT, _TEXT, _COUNTS, _TEXTS, _IDS, _FLAGGED = "count", "text", "counts", "texts", "ids", "flagged"

_FROM_CLIENT: dict[str, tuple[str, ...]] = {
    "sender": (_TEXT, _TEXT, _COUNT),
    "announce": (_TEXT, _COUNT, _COUNTS),
    "write": (_TEXT, _COUNT, _IDS, _COUNTS),
    "close": (_TEXT,),
    "receiver": (_TEXT, _COUNT),
    "take": (_TEXT, _COUNT, _COUNT, _COUNT),
    "cancel": (_TEXT, _COUNT),
    "lost": (_TEXT, _COUNT),
    "settle": (_TEXT, _TEXTS),
    "refuse": (_TEXT, _TEXT, _TEXT),
    "leave": (_TEXT,),
}
_FROM_BROKER: dict[str, tuple[str, ...]] = {
    "progress": (_COUNT, _COUNT, _COUNT, _COUNT, _COUNT),
    "failed": (_COUNT, _TEXT, _TEXT),
    "closed": (),
    "deliver": (_COUNT, _COUNT, _FLAGGED, _COUNTS),
    "end": (_COUNT,),
    "beat": (_COUNT, _COUNT, _COUNT),
    "left": (),
    "error": (_TEXT, _TEXT),
}
_CARRY_PAYLOADS = frozenset(("write", "deliver"))  # their last two fields: what the payloads are, and their sizes


def write_frames(body: Sequence[Any], payloads: Sequence[bytes] | None = None) -> list[bytes]:
    """The frames of [kind, …] and, for a kind that carries them, its payloads; their sizes are added to the body."""
    if payloads is None:
        return [msgpack.packb(body, unicode_errors="surrogatepass")]
    header = msgpack.packb([*body, list(map(len, payloads))], unicode_errors="surrogatepass")
    return [header, payloads[0] if len(payloads) == 1 else b"".join(payloads)]


def read_from_client(frames: Sequence[bytes]) -> tuple[str, list[Any], Sequence[bytes]]:
    """(kind, fields, payloads) of a client's frames. Raises a FrameError."""
    return _read(frames, _FROM_CLIENT)


def read_from_broker(frames: Sequence[bytes]) -> tuple[str, list[Any], Sequence[bytes]]:
    """(kind, fields, payloads) of a broker's frames. Raises a FrameError."""
    return _read(frames, _FROM_BROKER)


def _read(frames: Sequence[bytes], shapes: dict[str, tuple[str, ...]]) -> tuple[str, list[Any], Sequence[bytes]]:
    if not frames:
        raise TruncatedFrame("a message needs at least one frame")
    if len(frames[0]) > MAX_BODY_BYTES:
        raise OversizedFrame(f"a control frame of {len(frames[0])} bytes, {MAX_BODY_BYTES} are admitted")
    try:
        body = msgpack.unpackb(frames[0], unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"the control frame is not msgpack: {error}") from error
    if type(body) is not list or not body or type(body[0]) is not str:
        raise MalformedFrame("a control frame must be [kind, …]")
    kind, *fields = body
    shape = shapes.get(kind)
    if shape is None:
        raise UnknownTag(f"no message of kind {kind!r:.40}; known are {', '.join(shapes)}")
    if len(fields) != len(shape) or not all(_fits(value, form) for value, form in zip(fields, shape, strict=True)):
        raise MalformedFrame(f"{kind} carries {', '.join(shape) or 'nothing'}")
    if kind not in _CARRY_PAYLOADS:
        if len(frames) != 1:
            raise MalformedFrame(f"{kind} carries no payloads, {len(frames) - 1} frames came")
        return kind, fields, ()
    return kind, fields[:-1], _cut(kind, fields[-1], len(fields[-2]), frames[1:])


def _cut(kind: str, sizes: list[int], listed: int, frames: Sequence[bytes]) -> list[bytes]:
    """The payloads, each a copy of its own, so that none keeps the others in memory."""
    if len(sizes) != listed or len(frames) != 1:
        raise MalformedFrame(f"{kind} lists {listed} payloads and {len(sizes)} sizes, {len(frames)} frames came")
    joined = frames[0]
    if sum(sizes) != len(joined):
        raise TruncatedFrame(f"{kind} announces {sum(sizes)} bytes of payloads, {len(joined)} came")
    ends = itertools.accumulate(sizes)
    return [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _fits(value: Any, form: str) -> bool:
    if form is _COUNT:
        return type(value) is int and value >= 0
    if form is _TEXT:
        return type(value) is str
    if type(value) is not list:
        return False
    if form is _COUNTS:
        return all(type(item) is int and item >= 0 for item in value)
    if form is _TEXTS:
        return all(type(item) is str for item in value)
    second = str if form is _IDS else bool
    return all(
        type(item) is list and len(item) == 2 and type(item[0]) is str and type(item[1]) is second
        and len(item[0]) <= MAX_ID_CHARACTERS
        for item in value
    )  # fmt: skip
