"""Messages as frames: a msgpack header and one raw frame per array; and frames as one payload.

    header = [tag, schema version, [field, …], [[dtype, [size]], …]]      frames = [header, array, array, …]

Fields and arrays stand in the order of the tables below; every array is one-dimensional and little-endian. What `decode`
returns has the types, dtypes and shapes that `types` promises, or it raises a FrameError: garbage never becomes a message.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrl.errors import MalformedFrame, OversizedFrame, TruncatedFrame, UnknownSchema, UnknownTag
from asyncrl.messages.types import GroupId, ScoredGroup, Trajectory, TrajectoryId

SCHEMA_VERSION = 1
MAX_FRAMES = 4096
TRAJECTORY, SCORED_GROUP = "trajectory", "scored_group"

Message = Trajectory | ScoredGroup
Array = npt.NDArray[Any]
Frame = bytes | memoryview

_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("<i4", "<f4", "|b1")}
_INT32, _FLOAT32, _BOOL = _DTYPES.values()
_TRAJECTORY_ARRAYS = (_INT32, _INT32, _BOOL, _FLOAT32, _INT32)  # prompt_tokens, response_tokens, loss_mask, log_probs, versions
_GROUP_ARRAYS = (_INT32, _INT32, *_TRAJECTORY_ARRAYS, _FLOAT32)  # members, lengths, those, rewards; then the components
_FINISH_REASONS = frozenset(("stop", "length", "abort", "failed"))
_SCALARS = frozenset((type(None), bool, int, float, str))


def envelope(message: Message) -> tuple[str, str]:
    """(message id, group id) as text: what the queue knows of a message."""
    if type(message) is Trajectory:
        return str(message.id), str(message.id.group)
    return str(message.id), str(message.id)


def encode(message: Message) -> list[bytes]:
    """The frames of a message. Raises MalformedFrame for one that `decode` would refuse, with its id and what is wrong."""
    tag, fields, arrays = _take_apart(message)
    try:
        _build(tag, fields, arrays)
        header = msgpack.packb(
            [tag, SCHEMA_VERSION, fields, [[array.dtype.str, array.shape] for array in arrays]],
            unicode_errors="surrogatepass",
        )
    except MalformedFrame as error:
        raise MalformedFrame(f"{tag} {message.id}: {error}") from None
    except (TypeError, ValueError, OverflowError, KeyError, RecursionError) as error:
        raise MalformedFrame(f"{tag} {message.id} holds a value that cannot travel: {error}") from error
    return [header, *(array.tobytes() for array in arrays)]


def decode(frames: Sequence[Frame], *, max_bytes: int) -> Message:
    """The message of these frames; its arrays are read-only views of them.

    Raises OversizedFrame above `max_bytes` in sum, UnknownTag, UnknownSchema, TruncatedFrame, MalformedFrame.
    """
    if not frames:
        raise TruncatedFrame("a message needs a header frame, found no frame")
    views = [memoryview(frame) for frame in frames]
    size = sum(view.nbytes for view in views)
    if size > max_bytes:
        raise OversizedFrame(f"a message of {size} bytes arrived, {max_bytes} are admitted")
    tag, fields, specs = _header(views[0])
    if len(views) - 1 != len(specs):
        raise TruncatedFrame(f"the header announces {len(specs)} arrays, {len(views) - 1} came")
    return _build(tag, fields, [_array(spec, view) for spec, view in zip(specs, views[1:], strict=True)])


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Frames as one payload: how many (8 bytes), the size of each (8 bytes each), then each padded to 8 bytes, so that arrays
    stay aligned."""
    parts = [struct.pack(f"<{len(frames) + 1}Q", len(frames), *map(len, frames))]
    for frame in frames:
        parts.append(frame)
        if pad := -len(frame) % 8:
            parts.append(bytes(pad))
    return b"".join(parts)


def split_frames(payload: Frame) -> list[memoryview]:
    """The frames of `join_frames`, as views. Raises TruncatedFrame or MalformedFrame."""
    view = memoryview(payload)
    if view.nbytes < 8:
        raise TruncatedFrame(f"a payload has at least 8 bytes, found {view.nbytes}")
    (count,) = struct.unpack_from("<Q", view)
    if not 1 <= count <= MAX_FRAMES:
        raise MalformedFrame(f"a payload has 1 to {MAX_FRAMES} frames, found {count}")
    start = 8 + 8 * count
    if view.nbytes < start:
        raise TruncatedFrame(f"the sizes of {count} frames need {start} bytes, found {view.nbytes}")
    frames = []
    for size in struct.unpack_from(f"<{count}Q", view, 8):
        frames.append(view[start : start + size])
        start += size + -size % 8
    if start != view.nbytes:
        raise TruncatedFrame(f"the payload announces {start} bytes, found {view.nbytes}")
    return frames


def _header(frame: memoryview) -> tuple[str, list[Any], list[Any]]:
    try:
        header = msgpack.unpackb(frame, unicode_errors="surrogatepass", ext_hook=_no_extension)
    except MalformedFrame:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"the header is not msgpack: {error}") from error
    if type(header) is not list or len(header) != 4:
        raise MalformedFrame("the header must be [tag, schema version, fields, arrays]")
    tag, schema, fields, specs = header
    if tag not in (TRAJECTORY, SCORED_GROUP):
        raise UnknownTag(f"the header names {tag!r:.40}; known are {TRAJECTORY} and {SCORED_GROUP}")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise UnknownSchema(f"{tag} of schema {schema!r:.40}; this build reads schema {SCHEMA_VERSION}")
    if type(fields) is not list or type(specs) is not list:
        raise MalformedFrame("fields and arrays must be lists")
    return tag, fields, specs


def _no_extension(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"a message has no extension types, found {code}")


def _array(spec: Any, frame: memoryview) -> Array:
    try:
        name, (size,) = spec
        dtype = _DTYPES[name]
    except (TypeError, ValueError, KeyError):
        raise MalformedFrame(f"an array must be [dtype, [size]] of a known dtype, found {spec!r:.80}") from None
    if type(size) is not int or frame.nbytes != size * dtype.itemsize:
        raise TruncatedFrame(f"an array of {size!r:.40} × {dtype} came in {frame.nbytes} bytes")
    if dtype is _BOOL and bytes(frame).translate(None, b"\0\1"):
        raise MalformedFrame("a boolean array holds a byte other than 0 and 1")
    return np.frombuffer(frame, dtype)


def _take_apart(message: Message) -> tuple[str, list[Any], list[Array]]:
    if type(message) is Trajectory:
        fields = [
            list(message.id), message.group_size, message.start_version, message.finish_reason, message.prompt, message.response,
            message.ground_truth, message.extra_info, message.messages, message.tool_calls, message.generate_seconds,
            message.failure,
        ]  # fmt: skip
        arrays = [message.prompt_tokens, message.response_tokens, message.loss_mask, message.log_probs, message.versions]
        return TRAJECTORY, fields, arrays
    assert type(message) is ScoredGroup, f"no message: {type(message).__name__}"
    fields = [
        list(message.id), message.group_size, message.start_version, list(message.components), message.finish_reasons,
        message.failures, message.prompt, message.responses, message.ground_truth, message.metrics,
    ]  # fmt: skip
    arrays = [
        message.members, message.lengths, message.prompt_tokens, message.response_tokens, message.loss_mask, message.log_probs,
        message.versions, message.rewards, *message.components.values(),
    ]  # fmt: skip
    return SCORED_GROUP, fields, arrays


def _build(tag: str, fields: list[Any], arrays: list[Array]) -> Message:
    """The message of these parts, every rule checked. Raises MalformedFrame."""
    return _trajectory(fields, arrays) if tag == TRAJECTORY else _scored_group(fields, arrays)


def _trajectory(fields: list[Any], arrays: list[Array]) -> Trajectory:
    _check(len(fields) == 12, "a trajectory has 12 fields", len(fields))
    (identity, group_size, start_version, finish, prompt, response, truth, extra, messages, calls, seconds, failure) = fields
    _check_arrays(arrays, _TRAJECTORY_ARRAYS)
    prompt_tokens, response_tokens, loss_mask, log_probs, versions = arrays
    sizes = {response_tokens.size, loss_mask.size, log_probs.size, versions.size}
    _check(len(sizes) == 1, "response_tokens, loss_mask, log_probs and versions are equally long", sizes)
    _check_identity(identity, 4, group_size, start_version)
    _check(identity[3] < group_size, "member is below group_size", identity)
    _check(type(finish) is str and finish in _FINISH_REASONS, "finish_reason is a known one", finish)
    _check(type(prompt) in (str, list), "prompt is text or chat messages", prompt)
    _check(type(response) is str, "response is text", response)
    _check(failure is None or type(failure) is str, "failure is text or nothing", failure)
    _check(failure is None or response_tokens.size == 0, "a failed trajectory has no response tokens", response_tokens.size)
    _check(_is_number(seconds) and 0 <= seconds < math.inf, "generate_seconds is a duration", seconds)
    _check(type(extra) is dict and type(messages) is list and type(calls) is list, "extra_info, messages, tool_calls fit", "")
    for value in (prompt, truth, extra, messages, calls):
        _check(_is_json(value), "prompt, ground_truth, extra_info, messages and tool_calls hold plain values only", value)
    return Trajectory(
        TrajectoryId(*identity), group_size, start_version, prompt_tokens, response_tokens, loss_mask, log_probs, versions,
        finish, prompt, response, truth, extra, messages, calls, float(seconds), failure,
    )  # fmt: skip


def _scored_group(fields: list[Any], arrays: list[Array]) -> ScoredGroup:
    _check(len(fields) == 10, "a scored group has 10 fields", len(fields))
    (identity, group_size, start_version, names, finish_reasons, failures, prompt, responses, truth, metrics) = fields
    _check(_list_of(names, _is_text) and len(set(names)) == len(names), "components have names, each once", names)
    _check_arrays(arrays, _GROUP_ARRAYS + (_FLOAT32,) * len(names))
    members, lengths, prompt_tokens, response_tokens, loss_mask, log_probs, versions, rewards, *components = arrays
    _check_identity(identity, 3, group_size, start_version)
    _check_members(members, lengths, group_size, {response_tokens.size, loss_mask.size, log_probs.size, versions.size})
    counts = {members.size, rewards.size, *(component.size for component in components)}
    _check(len(counts) == 1, "rewards and components have one value per member", counts)
    per_member = [(finish_reasons, _is_text), (failures, _is_text_or_none), (responses, _is_text)]
    for values, is_right in per_member:
        _check(_list_of(values, is_right) and len(values) == members.size, "texts are one per member", values)
    unexplained = [bool(bad and failure is None) for bad, failure in zip(np.isnan(rewards), failures, strict=True)]
    _check(not any(unexplained), "a member without a reward has its failure", unexplained)
    _check(type(prompt) in (str, list) and _is_json(prompt), "prompt is text or chat messages", prompt)
    _check(_is_json(truth), "ground_truth holds plain values only", truth)
    numbers = type(metrics) is dict and all(map(_is_text, metrics)) and all(map(_is_number, metrics.values()))
    _check(numbers, "metrics are numbers by name", metrics)
    return ScoredGroup(
        GroupId(*identity), group_size, start_version, prompt_tokens, members, lengths, response_tokens, loss_mask, log_probs,
        versions, rewards, dict(zip(names, components, strict=True)), finish_reasons, failures, prompt, responses, truth,
        metrics,
    )  # fmt: skip


def _check(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise MalformedFrame(f"{rule}; found {found!r:.120}")


def _check_arrays(arrays: list[Array], dtypes: Sequence[np.dtype[Any]]) -> None:
    _check(len(arrays) == len(dtypes), f"{len(dtypes)} arrays", len(arrays))
    for position, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if array.dtype != dtype or array.ndim != 1:
            raise MalformedFrame(f"array {position} is one-dimensional {dtype}; found {array.dtype}{list(array.shape)}")


def _check_identity(identity: Any, length: int, group_size: Any, start_version: Any) -> None:
    _check(_list_of(identity, _is_count) and len(identity) == length, f"an id is {length} counts", identity)
    _check(_is_count(group_size) and group_size >= 1, "group_size is at least 1", group_size)
    _check(_is_count(start_version), "start_version is at least 0", start_version)


def _check_members(members: Array, lengths: Array, group_size: int, token_counts: set[int]) -> None:
    present, spans = members.tolist(), lengths.tolist()
    ascending = all(low < high for low, high in itertools.pairwise(present))
    inside = not present or (present[0] >= 0 and present[-1] < group_size)
    _check(ascending and inside, "members ascend, from 0 to below group_size", present)
    _check(len(spans) == len(present) and all(span >= 0 for span in spans), "one length of at least 0 per member", spans)
    _check(token_counts == {sum(spans)}, "the token arrays are as long as the lengths say", (token_counts, spans))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_text_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _list_of(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return type(value) is list and all(map(is_right, value))


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is list or kind is tuple:
        return all(map(_is_json, value))
    return kind is dict and all(map(_is_text, value)) and all(map(_is_json, value.values()))
