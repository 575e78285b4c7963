"""Messages as frames: a msgpack header and one raw frame per array; and frames as one payload.

    header = [tag, schema version, [field, …], [dtype, …], [[size], …]]      frames = [header, array, array, …]

Fields and arrays stand in the order of the tables below; every array is one-dimensional and little-endian. What `decode`
returns has the types, dtypes and shapes that `types` promises, or it raises a FrameError: garbage never becomes a message.
Both directions stand on the hot path, once per trajectory: about 20 µs each for 8 KB.
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
Frame = bytes | memoryview  # a memoryview of bytes

_INT32, _FLOAT32, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype("?")
_NAMES: dict[np.dtype[Any], str] = {_INT32: "<i4", _FLOAT32: "<f4", _BOOL: "|b1"}
_TOKENS: list[np.dtype[Any]] = [_INT32, _BOOL, _FLOAT32, _INT32]  # response_tokens, loss_mask, log_probs, versions
_TRAJECTORY_DTYPES = [_INT32, *_TOKENS]  # prompt_tokens, those
_GROUP_DTYPES = [_INT32, _INT32, _INT32, *_TOKENS, _FLOAT32]  # members, lengths, prompt_tokens, those, rewards, components
_FINISH_REASONS = frozenset(("stop", "length", "abort", "failed"))
_SCALARS = frozenset((type(None), bool, int, float, str))
_PADDING = [bytes(-size % 8) for size in range(8)]


def envelope(message: Message) -> tuple[str, str]:
    """(message id, group id) as text: what the queue knows of a message."""
    if type(message) is Trajectory:
        epoch, row, attempt, member = message.id
        group = f"{epoch}/{row}/{attempt}"
        return f"{group}/{member}", group
    return str(message.id), str(message.id)


def encode(message: Message) -> list[bytes]:
    """The frames of a message. Raises MalformedFrame for one that `decode` would refuse, with its id and what is wrong."""
    tag, fields, arrays = _take_apart(message)
    try:
        _check_shapes(arrays, _dtypes(tag, fields))
        _check_parts(tag, fields, arrays)
        header = msgpack.packb(
            [tag, SCHEMA_VERSION, fields, [_NAMES[array.dtype] for array in arrays], [array.shape for array in arrays]],
            unicode_errors="surrogatepass",
        )
    except MalformedFrame as error:
        raise MalformedFrame(f"{tag} {message.id}: {error}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedFrame(f"{tag} {message.id} holds a value that cannot travel: {error}") from error
    return [header, *[array.tobytes() for array in arrays]]


def decode(frames: Sequence[Frame], *, max_bytes: int) -> Message:
    """The message of these frames; its arrays are read-only views of them.

    Raises OversizedFrame above `max_bytes` in sum, UnknownTag, UnknownSchema, TruncatedFrame, MalformedFrame.
    """
    if not frames:
        raise TruncatedFrame("a message needs a header frame, found no frame")
    size = sum(map(len, frames))
    if size > max_bytes:
        raise OversizedFrame(f"a message of {size} bytes arrived, {max_bytes} are admitted")
    tag, fields, names, shapes = _header(frames[0])
    dtypes = _dtypes(tag, fields)
    if names != [_NAMES[dtype] for dtype in dtypes]:
        raise MalformedFrame(f"{tag} has arrays of {[_NAMES[dtype] for dtype in dtypes]}; found {names!r:.120}")
    if len(frames) - 1 != len(dtypes) or len(shapes) != len(dtypes):
        raise TruncatedFrame(f"{tag} has {len(dtypes)} arrays; {len(shapes)} shapes and {len(frames) - 1} frames came")
    arrays = [_array(frame, dtype, shape) for frame, dtype, shape in zip(frames[1:], dtypes, shapes, strict=True)]
    _check_parts(tag, fields, arrays)
    return _trajectory(fields, arrays) if tag == TRAJECTORY else _scored_group(fields, arrays)


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Frames as one payload: how many (8 bytes), the size of each (8 bytes each), then each padded to 8 bytes, so that arrays
    stay aligned."""
    parts = [struct.pack(f"<{len(frames) + 1}Q", len(frames), *map(len, frames))]
    for frame in frames:
        parts += (frame, _PADDING[len(frame) & 7])
    return b"".join(parts)


def split_frames(payload: Frame) -> list[memoryview]:
    """The frames of `join_frames`, as views. Raises TruncatedFrame or MalformedFrame."""
    view = memoryview(payload)
    if len(view) < 8:
        raise TruncatedFrame(f"a payload has at least 8 bytes, found {len(view)}")
    count = int.from_bytes(view[:8], "little")
    if not 1 <= count <= MAX_FRAMES:
        raise MalformedFrame(f"a payload has 1 to {MAX_FRAMES} frames, found {count}")
    start = 8 + 8 * count
    if len(view) < start:
        raise TruncatedFrame(f"the sizes of {count} frames need {start} bytes, found {len(view)}")
    frames = []
    for size in struct.unpack_from(f"<{count}Q", view, 8):
        frames.append(view[start : start + size])
        start += size + (-size & 7)
    if start != len(view):
        raise TruncatedFrame(f"the payload announces {start} bytes, found {len(view)}")
    return frames


def _header(frame: Frame) -> tuple[str, list[Any], list[Any], list[Any]]:
    try:
        header = msgpack.unpackb(frame, unicode_errors="surrogatepass", ext_hook=_no_extension)
    except MalformedFrame:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"the header is not msgpack: {error}") from error
    if type(header) is not list or len(header) != 5:
        raise MalformedFrame("the header must be [tag, schema version, fields, dtypes, shapes]")
    tag, schema, fields, names, shapes = header
    if tag not in (TRAJECTORY, SCORED_GROUP):
        raise UnknownTag(f"the header names {tag!r:.40}; known are {TRAJECTORY} and {SCORED_GROUP}")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise UnknownSchema(f"{tag} of schema {schema!r:.40}; this build reads schema {SCHEMA_VERSION}")
    if type(fields) is not list or type(names) is not list or type(shapes) is not list:
        raise MalformedFrame("fields, dtypes and shapes must be lists")
    return tag, fields, names, shapes


def _no_extension(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"a message has no extension types, found {code}")


def _dtypes(tag: str, fields: list[Any]) -> list[np.dtype[Any]]:
    """The dtypes that a message of this tag has; those of a scored group depend on its components. Checks the fields' number."""
    if tag == TRAJECTORY:
        _check(len(fields) == 12, "a trajectory has 12 fields", len(fields))
        return _TRAJECTORY_DTYPES
    _check(len(fields) == 10, "a scored group has 10 fields", len(fields))
    names = fields[3]
    _check(_list_of(names, _is_text) and len(set(names)) == len(names), "components have names, each once", names)
    return _GROUP_DTYPES + [_FLOAT32] * len(names)


def _array(frame: Frame, dtype: np.dtype[Any], shape: Any) -> Array:
    if type(shape) is not list or len(shape) != 1 or type(shape[0]) is not int:
        raise MalformedFrame(f"an array has one dimension, found shape {shape!r:.80}")
    if len(frame) != shape[0] * dtype.itemsize:
        raise TruncatedFrame(f"an array of {shape[0]} × {dtype} came in {len(frame)} bytes")
    if dtype is _BOOL and bytes(frame).translate(None, b"\0\1"):
        raise MalformedFrame("a boolean array holds a byte other than 0 and 1")
    return np.frombuffer(frame, dtype)


def _check_shapes(arrays: list[Array], dtypes: list[np.dtype[Any]]) -> None:
    for position, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if array.dtype != dtype or array.ndim != 1:
            raise MalformedFrame(f"array {position} is one-dimensional {dtype}; found {array.dtype}{list(array.shape)}")


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


def _check_parts(tag: str, fields: list[Any], arrays: list[Array]) -> None:
    """Every rule of `types` on parts whose number and dtypes are right. Raises MalformedFrame."""
    if tag == TRAJECTORY:
        _check_trajectory(fields, arrays)
    else:
        _check_scored_group(fields, arrays)


def _check_trajectory(fields: list[Any], arrays: list[Array]) -> None:
    (identity, group_size, start_version, finish, prompt, response, truth, extra, messages, calls, seconds, failure) = fields
    num_tokens = _num_tokens(arrays[1:5])
    _check_identity(identity, 4, group_size, start_version)
    if identity[3] >= group_size:
        raise MalformedFrame(f"member is below group_size {group_size}; found {identity}")
    if type(finish) is not str or finish not in _FINISH_REASONS:
        raise MalformedFrame(f"finish_reason is a known one; found {finish!r:.40}")
    if type(response) is not str:
        raise MalformedFrame(f"response is text; found {response!r:.40}")
    if failure is not None and (type(failure) is not str or num_tokens):
        raise MalformedFrame(f"a failed trajectory has its failure as text and no response tokens; found {failure!r:.40}")
    if not (_is_number(seconds) and 0 <= seconds < math.inf):
        raise MalformedFrame(f"generate_seconds is a duration; found {seconds!r:.40}")
    _check_prompt(prompt)
    if type(extra) is not dict or type(messages) is not list or type(calls) is not list:
        raise MalformedFrame("extra_info is a mapping, messages and tool_calls are lists")
    for value in (truth, extra, messages, calls):
        if not _is_json(value):
            raise MalformedFrame(
                f"ground_truth, extra_info, messages and tool_calls hold plain values only; found {value!r:.120}"
            )


def _trajectory(fields: list[Any], arrays: list[Array]) -> Trajectory:
    (identity, group_size, start_version, finish, prompt, response, truth, extra, messages, calls, seconds, failure) = fields
    prompt_tokens, response_tokens, loss_mask, log_probs, versions = arrays
    return Trajectory(
        TrajectoryId(*identity), group_size, start_version, prompt_tokens, response_tokens, loss_mask, log_probs, versions,
        finish, prompt, response, truth, extra, messages, calls, float(seconds), failure,
    )  # fmt: skip


def _check_scored_group(fields: list[Any], arrays: list[Array]) -> None:
    (identity, group_size, start_version, _names, finish_reasons, failures, prompt, responses, truth, metrics) = fields
    members, lengths, _prompt_tokens, *tokens, rewards = arrays[:8]
    _check_identity(identity, 3, group_size, start_version)
    _check_members(members, lengths, group_size, _num_tokens(tokens))
    counts = {members.size, rewards.size, *(component.size for component in arrays[8:])}
    _check(len(counts) == 1, "rewards and components have one value per member", counts)
    per_member = [(finish_reasons, _is_text), (failures, _is_text_or_none), (responses, _is_text)]
    for values, is_right in per_member:
        _check(_list_of(values, is_right) and len(values) == members.size, "texts are one per member", values)
    unexplained = [bool(bad and failure is None) for bad, failure in zip(np.isnan(rewards), failures, strict=True)]
    _check(not any(unexplained), "a member without a reward has its failure", unexplained)
    _check_prompt(prompt)
    _check(_is_json(truth), "ground_truth holds plain values only", truth)
    numbers = type(metrics) is dict and all(map(_is_text, metrics)) and all(map(_is_number, metrics.values()))
    _check(numbers, "metrics are numbers by name", metrics)


def _scored_group(fields: list[Any], arrays: list[Array]) -> ScoredGroup:
    (identity, group_size, start_version, names, finish_reasons, failures, prompt, responses, truth, metrics) = fields
    members, lengths, prompt_tokens, response_tokens, loss_mask, log_probs, versions, rewards, *components = arrays
    return ScoredGroup(
        GroupId(*identity), group_size, start_version, prompt_tokens, members, lengths, response_tokens, loss_mask, log_probs,
        versions, rewards, dict(zip(names, components, strict=True)), finish_reasons, failures, prompt, responses, truth,
        metrics,
    )  # fmt: skip


def _check(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise MalformedFrame(f"{rule}; found {found!r:.120}")


def _num_tokens(arrays: list[Array]) -> int:
    size = arrays[0].size
    if any(array.size != size for array in arrays):
        raise MalformedFrame(f"the token arrays are equally long; found {[array.size for array in arrays]}")
    return size


def _check_prompt(prompt: Any) -> None:
    if type(prompt) not in (str, list) or not _is_json(prompt):
        raise MalformedFrame(f"prompt is text or chat messages of plain values; found {prompt!r:.120}")


def _check_identity(identity: Any, length: int, group_size: Any, start_version: Any) -> None:
    if type(identity) is not list or len(identity) != length or not all(map(_is_count, identity)):
        raise MalformedFrame(f"an id is {length} counts; found {identity!r:.80}")
    if type(group_size) is not int or group_size < 1:
        raise MalformedFrame(f"group_size is at least 1; found {group_size!r:.40}")
    if not _is_count(start_version):
        raise MalformedFrame(f"start_version is at least 0; found {start_version!r:.40}")


def _check_members(members: Array, lengths: Array, group_size: int, num_tokens: int) -> None:
    present, spans = members.tolist(), lengths.tolist()
    ascending = all(low < high for low, high in itertools.pairwise(present))
    inside = not present or (present[0] >= 0 and present[-1] < group_size)
    _check(ascending and inside, "members ascend, from 0 to below group_size", present)
    _check(len(spans) == len(present) and all(span >= 0 for span in spans), "one length of at least 0 per member", spans)
    _check(num_tokens == sum(spans), "the token arrays are as long as the lengths say", (num_tokens, spans))


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
