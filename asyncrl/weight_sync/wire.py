"""What ParameterSync and a receiver say to each other: a msgpack header, and raw bytes in a frame of their own.

    BEGIN    (plan_id, plan?)                      a version is coming; the plan itself only when the receiver may not know it
    FETCH    (slots, first/count or slices, …)     read these slices from these shared-memory slots
    BUCKET   (first, count, …) + bytes             these slices, as they lie in the slot from the first one on
    COMMIT   (kv_policy)                           swap, if the version is complete
    DIGEST   ()                                    checksums of every slice, from the live parameters
    CHECK    (plan_id, plan?)                      checksums of every slice of this plan, from whatever is live
    STATUS   ()                                    what the receiver holds (committed, digest); answered at once
    CANCEL   ()                                    give up reading this version

Every message carries (incarnation, version) and a request number, which its reply repeats. Replies carry `ok`, or `error` (one
word of ERRORS) and `text`; messages may be sent without waiting for replies and are executed in order. A refused message
changes nothing, and those behind it that depend on it are refused in turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrl.errors import MalformedFrame
from asyncrl.protocols.weights import KvPolicy

Kind = Literal["BEGIN", "FETCH", "BUCKET", "COMMIT", "DIGEST", "CHECK", "STATUS", "CANCEL"]
KINDS = frozenset(get_args(Kind))
ERRORS = frozenset(
    {
        "stale_incarnation",  # an earlier start of the trainer
        "old_version",  # older than what is committed
        "unknown_plan",  # BEGIN or CHECK named a plan that this receiver was never told
        "plan_mismatch",  # the plan and the live parameters disagree
        "not_begun",  # the message's version is not the one begun
        "superseded",  # cancelled, or a newer version began meanwhile
        "incomplete",  # COMMIT before every slice arrived and was checked
        "not_committed",  # DIGEST of a version that is not live
        "malformed",  # not a message
        "failed",  # the server could not: shared memory gone, commit raised
    }
)
CHECKSUM_BYTES = 4
_MAX_NUMBER = 2**63
_VERSION = re.compile(r"[0-9]{1,19}\.[0-9]{1,19}")
MAX_HEADER_BYTES = 64 * 1024 * 1024
Checksums = npt.NDArray[np.uint32]
"""CRC-32 of every slice, in plan order."""


def pack(header: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(header, use_bin_type=True))


def unpack(frame: bytes | memoryview) -> dict[str, Any]:
    """A header. Raises MalformedFrame."""
    if len(frame) > MAX_HEADER_BYTES:
        raise MalformedFrame(f"a header has at most {MAX_HEADER_BYTES} bytes, this one {len(frame)}")
    try:
        header = msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedFrame(f"not a msgpack header: {error}") from error
    if not isinstance(header, dict):
        raise MalformedFrame(f"a header is a map, this one a {type(header).__name__}")
    return header


def check_request(header: dict[str, Any]) -> None:
    """Raises MalformedFrame for a header that is no request: of an unknown kind, or whose fields are not what its kind has."""
    kind = header.get("kind")
    if type(kind) is not str or kind not in KINDS:
        raise MalformedFrame(f"unknown kind {kind!r:.40}")
    for name, is_right in {**_EVERY, **_FIELDS.get(kind, {})}.items():
        if not is_right(header.get(name)):
            raise MalformedFrame(f"{kind} needs another {name} than {header.get(name)!r:.40}")


def check_reply(kind: Kind, header: dict[str, Any]) -> None:
    """Raises MalformedFrame for a header that is no reply to a request of this kind."""
    fields = _REFUSAL if "error" in header else _REPLIES.get(kind, {})
    for name, is_right in {**_EVERY_REPLY, **fields}.items():
        if not is_right(header.get(name)):
            raise MalformedFrame(f"the reply to {kind} needs another {name} than {header.get(name)!r:.40}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MAX_NUMBER


def _are_checksums(value: Any) -> bool:
    return type(value) is bytes and len(value) % CHECKSUM_BYTES == 0


def _is_version(value: Any) -> bool:
    return type(value) is str and _VERSION.fullmatch(value) is not None


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(is_right, value))


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


_EVERY: dict[str, Callable[[Any], bool]] = dict.fromkeys(("request", "incarnation", "version"), _is_count)
_NAMED_PLAN = {"plan_id": _is_text, "plan": _or_none(lambda value: type(value) is dict)}
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "BEGIN": _NAMED_PLAN,
    "CHECK": _NAMED_PLAN,
    "FETCH": {
        "slots": _list_of(_is_text),
        "slices": _or_none(_list_of(_is_count)),
        "checksums": _are_checksums,
        "bytes_per_second": _or_none(lambda value: _is_seconds(value) and value > 0),
    },
    "BUCKET": {"first": _is_count, "count": _is_count, "checksums": _are_checksums},
    "COMMIT": {"kv_policy": lambda value: type(value) is str and value in get_args(KvPolicy)},
}
_EVERY_REPLY: dict[str, Callable[[Any], bool]] = {"request": _is_count, "session": _is_text}
_REFUSAL: dict[str, Callable[[Any], bool]] = {"error": lambda value: type(value) is str and value in ERRORS, "text": _is_text}
_MOVED: dict[str, Callable[[Any], bool]] = {"refused": _list_of(_is_count), "bytes": _is_count}
_REPLIES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "FETCH": _MOVED,
    "BUCKET": _MOVED,
    "COMMIT": {"pause_seconds": _is_seconds, "recompute_seconds": _is_seconds},
    "DIGEST": {"checksums": _are_checksums},
    "CHECK": {"checksums": _are_checksums},
    "STATUS": {"committed": _or_none(_is_version), "begun": _or_none(_is_version), "digest": _or_none(_is_text)},
}


def checksums_to_wire(checksums: Checksums) -> bytes:
    return checksums.astype("<u4").tobytes()


def digest_of(checksums: Checksums) -> str:
    """One word for all of them: equal where every slice is."""
    return hashlib.blake2b(checksums_to_wire(checksums), digest_size=16).hexdigest()


def checksums_from_wire(data: bytes) -> Checksums:
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)
