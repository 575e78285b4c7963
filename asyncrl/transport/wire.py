"""What brokers and clients write to each other: a frame with the msgpack list [kind, …], and the payloads in blocks.

    sender → broker     sender(topic, producer, beat)   here I am, every few seconds; `beat` is echoed in `progress`
                        announce(topic, first, sizes)   messages number `first` on wait, of these sizes in bytes
                        write(topic, first, message_ids, group_ids, sizes) + blocks   announces what was not
                        close(topic)                    end of this sender's stream
    broker → sender     progress(beat, announced, granted, handled, capacity_bytes)    counts; beat 0: of the broker's own accord
                        failed(number, kind, text)      this message was refused
                        closed()
    receiver → broker   receiver(topic, consumer, beat)                here I am; echoed in `beat`
                        take(topic, request, max_items, received)      `received`: number of the last delivery that came
                        cancel(topic, request)          answer it now, if need be with nothing
                        lost(topic, received)           deliveries after this one did not come; numbered anew
                        settle(topic, message_ids)      done with
                        refuse(topic, message_id, reason)              its payload is no message
                        leave(topic)                    gives its leases back
    broker → receiver   deliver(delivery, request, num_redelivered, message_ids, sizes) + blocks    those redelivered come first
                        end(request)                    the typed end of stream
                        beat(beat, open request or 0, last delivery)
                        left()
    broker → any        error(kind, text)               what came could not be served

`sizes` are the payloads' bytes, a list for each block (`transport.blocks`). All counts are cumulative, so a lost or repeated
frame is seen at the next beat and mended by saying it again. Numbers of messages and of deliveries begin where the broker's life
has it (`records.LIFE_BITS`): a client that sees another life begins anew, a sender with the first message that was not handled, a
receiver with its open request; what was meant for another life is out of turn, and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from asyncrl.errors import MalformedFrame, OversizedFrame, TruncatedFrame, UnknownTag
from asyncrl.transport.blocks import Block, Blocks, Payload, cut

MAX_BODY_BYTES = 64 * 10**6
MAX_ID_CHARACTERS = 256
_JUST_INT, _JUST_TEXT = {int}, {str}
_pack = msgpack.Packer(unicode_errors="surrogatepass").pack  # of plain values, so it runs no Python code and threads may share it

_COUNT, _TEXT, _COUNTS, _IDS, _SIZES = "count", "text", "counts", "ids", "sizes"

_FROM_CLIENT: dict[str, tuple[str, ...]] = {
    "sender": (_TEXT, _TEXT, _COUNT),
    "announce": (_TEXT, _COUNT, _COUNTS),
    "write": (_TEXT, _COUNT, _IDS, _IDS, _SIZES),
    "close": (_TEXT,),
    "receiver": (_TEXT, _TEXT, _COUNT),
    "take": (_TEXT, _COUNT, _COUNT, _COUNT),
    "cancel": (_TEXT, _COUNT),
    "lost": (_TEXT, _COUNT),
    "settle": (_TEXT, _IDS),
    "refuse": (_TEXT, _TEXT, _TEXT),
    "leave": (_TEXT,),
}
_FROM_BROKER: dict[str, tuple[str, ...]] = {
    "progress": (_COUNT, _COUNT, _COUNT, _COUNT, _COUNT),
    "failed": (_COUNT, _TEXT, _TEXT),
    "closed": (),
    "deliver": (_COUNT, _COUNT, _COUNT, _IDS, _SIZES),
    "end": (_COUNT,),
    "beat": (_COUNT, _COUNT, _COUNT),
    "left": (),
    "error": (_TEXT, _TEXT),
}
_CARRY_PAYLOADS = frozenset(("write", "deliver"))  # their last fields: message ids, …, sizes


def write_frames(body: Sequence[Any], blocks: Blocks | None = None) -> list[Block | Payload]:
    """The frames of [kind, …] and, for a kind that carries payloads, their blocks; the sizes are added to the body."""
    if blocks is None:
        return [_pack(body)]
    return [_pack([*body, blocks.sizes]), *blocks.frames]


def read_from_client(frames: Sequence[bytes]) -> tuple[str, list[Any], list[memoryview]]:
    """(kind, fields, payloads) of a client's frames. Raises a FrameError."""
    return _read(frames, _FROM_CLIENT)


def read_from_broker(frames: Sequence[bytes]) -> tuple[str, list[Any], list[memoryview]]:
    """(kind, fields, payloads) of a broker's frames. Raises a FrameError."""
    return _read(frames, _FROM_BROKER)


def _read(frames: Sequence[bytes], shapes: dict[str, tuple[str, ...]]) -> tuple[str, list[Any], list[memoryview]]:
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
        return kind, fields, []
    payloads = cut(fields.pop(), frames[1:])
    listed = [len(ids) for ids in fields if type(ids) is list]
    if listed != [len(payloads)] * len(listed):
        raise MalformedFrame(f"{kind} lists {listed} ids, {len(payloads)} payloads came")
    return kind, fields, payloads


def _fits(value: Any, form: str) -> bool:
    if form is _COUNT:
        return type(value) is int and value >= 0
    if form is _TEXT:
        return type(value) is str
    if type(value) is not list:
        return False
    if form is _SIZES:
        return all(_fits(item, _COUNTS) for item in value)
    if not value:
        return True
    if form is _COUNTS:
        return set(map(type, value)) == _JUST_INT and min(value) >= 0
    return set(map(type, value)) == _JUST_TEXT and max(map(len, value)) <= MAX_ID_CHARACTERS
