"""Messages as bytes: a msgpack header and raw arrays, as frames or as one payload.

    header  = [tag, schema version, [field, …], [dtype, …], [size, …]]       every array has one dimension, of `size` elements
    frames  = [header, array, array, …]
    payload = header's length (8 bytes), header, array, array, …             each padded to 8 bytes, so that arrays stay aligned

Fields and arrays stand in the order of the tables below; numbers are little-endian. What `decode` and `from_payload` return has
the types, dtypes and shapes that `types` promises, or they raise a FrameError: garbage never becomes a message. A message that
would be refused there is refused by `encode` and `to_payload`, so that the mistake shows where it was made.

The payload stands on the hot path, twice per trajectory. Hence the few plain ways to save time: arrays are slices of one view
of the payload, tables replace attribute lists, a dataclass is filled at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrl.errors import MalformedFrame, OversizedFrame, TruncatedFrame, UnknownSchema, UnknownTag
from asyncrl.messages.types import GroupId, ScoredGroup, Trajectory, TrajectoryId

SCHEMA_VERSION = 1
TRAJECTORY, SCORED_GROUP = "trajectory", "scored_group"

Message = Trajectory | ScoredGroup
_Kind = TypeVar("_Kind", Trajectory, ScoredGroup)
Array = npt.NDArray[Any]
Frame = bytes | memoryview  # a memoryview of bytes

_TRAJECTORY_FIELDS = (
    "id", "group_size", "start_version", "finish_reason", "prompt", "response", "ground_truth", "extra_info", "messages",
    "tool_calls", "generate_seconds", "failure",
)  # fmt: skip
_GROUP_FIELDS = (
    "id", "group_size", "start_version", "components", "finish_reasons", "failures", "prompt", "responses", "ground_truth",
    "metrics",
)  # fmt: skip
_TRAJECTORY_ARRAYS = ("prompt_tokens", "response_tokens", "loss_mask", "log_probs", "versions")
_GROUP_ARRAYS = (*_TRAJECTORY_ARRAYS, "members", "lengths", "rewards")  # then one per component, whose names are a field
_TRAJECTORY_PARTS, _GROUP_PARTS = _TRAJECTORY_FIELDS + _TRAJECTORY_ARRAYS, _GROUP_FIELDS + _GROUP_ARRAYS
_TRAJECTORY_DTYPES = ["<i4", "<i4", "|b1", "<f4", "<i4"]
_GROUP_DTYPES = [*_TRAJECTORY_DTYPES, "<i4", "<i4", "<f4"]
_COMPONENT_DTYPE = "<f4"

_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("<i4", "<f4", "|b1")}
_INT32, _FLOAT32, _BOOL = _DTYPES.values()
_FINISH_REASONS = frozenset(("stop", "length", "abort", "failed"))
_SCALARS = frozenset((type(None), bool, int, float, str))
_CONTAINERS = frozenset((list, tuple, dict))
_PADDING = [bytes(-size % 8) for size in range(8)]
_LENGTH_BYTES = 8

_trajectory_fields, _trajectory_arrays = itemgetter(*_TRAJECTORY_FIELDS), itemgetter(*_TRAJECTORY_ARRAYS)
_group_fields, _group_arrays = itemgetter(*_GROUP_FIELDS), itemgetter(*_GROUP_ARRAYS)


def envelope(message: Message) -> tuple[str, str]:
    """(message id, group id) as text: what the queue knows of a message."""
    if type(message) is Trajectory:
        epoch, row, attempt, member = message.id
        group = f"{epoch}/{row}/{attempt}"
        return f"{group}/{member}", group
    return str(message.id), str(message.id)


def encode(message: Message) -> list[bytes]:
    """The frames of a message. Raises MalformedFrame for one that `decode` would refuse, with its id and what is wrong."""
    header, arrays = _take_apart(message)
    return [header, *(array.tobytes() for array in arrays)]


def to_payload(message: Message) -> bytes:
    """The message as one payload. Raises as `encode`."""
    header, arrays = _take_apart(message)
    parts: list[Any] = [len(header).to_bytes(_LENGTH_BYTES, "little"), header, _PADDING[len(header) & 7]]
    for array in arrays:
        parts += (np.ascontiguousarray(array), _PADDING[array.nbytes & 7])
    return b"".join(parts)


def decode(frames: Sequence[Frame], *, max_bytes: int) -> Message:
    """The message of these frames; its arrays are read-only views of them.

    Raises OversizedFrame above `max_bytes` in sum, UnknownTag, UnknownSchema, TruncatedFrame, MalformedFrame.
    """
    if not frames:
        raise TruncatedFrame("a message needs a header frame, found no frame")
    size = sum(map(len, frames))
    if size > max_bytes:
        raise OversizedFrame(f"a message of {size} bytes arrived, {max_bytes} are admitted")
    tag, fields, names, sizes = _header(frames[0])
    found = [len(frame) for frame in frames[1:]]
    if found != [count * _DTYPES[name].itemsize for name, count in zip(names, sizes, strict=True)]:
        raise TruncatedFrame(f"{tag} announces arrays of {sizes!r:.80} elements; frames of {found} bytes came")
    return _put_together(tag, fields, [np.frombuffer(frame, name) for frame, name in zip(frames[1:], names, strict=True)])


def from_payload(payload: Frame) -> Message:
    """The message of this payload; its arrays are read-only views of it. Raises as `decode`."""
    view = memoryview(payload)
    if len(view) < _LENGTH_BYTES or len(view) % 8:
        raise TruncatedFrame(f"a payload is a multiple of 8 bytes, found {len(view)}")
    header_bytes = int.from_bytes(view[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + header_bytes + (-header_bytes & 7)
    if start > len(view):
        raise TruncatedFrame(f"the payload announces a header of {header_bytes} bytes and has {len(view)} in all")
    tag, fields, names, sizes = _header(view[_LENGTH_BYTES : _LENGTH_BYTES + header_bytes])
    integers = np.frombuffer(view, _INT32)
    whole = {"<i4": (integers, 4), "<f4": (integers.view(_FLOAT32), 4), "|b1": (integers.view(_BOOL), 1)}
    arrays: list[Array] = []
    for name, size in zip(names, sizes, strict=True):
        of, width = whole[name]
        first = start // width
        arrays.append(of[first : first + size])
        start += size * width + 7 & -8
    if start != len(view):
        raise TruncatedFrame(f"the payload announces {start} bytes, found {len(view)}")
    return _put_together(tag, fields, arrays)


def _header(frame: Frame) -> tuple[str, list[Any], list[str], list[int]]:
    """(tag, fields, dtypes, sizes): the dtypes are those of the tag, the sizes are counts, as many as there are arrays."""
    try:
        header = msgpack.unpackb(frame, unicode_errors="surrogatepass", ext_hook=_no_extension)
    except MalformedFrame:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"the header is not msgpack: {error}") from error
    if type(header) is not list or len(header) != 5:
        raise MalformedFrame("the header must be [tag, schema version, fields, dtypes, sizes]")
    tag, schema, fields, names, sizes = header
    if tag not in (TRAJECTORY, SCORED_GROUP):
        raise UnknownTag(f"the header names {tag!r:.40}; known are {TRAJECTORY} and {SCORED_GROUP}")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise UnknownSchema(f"{tag} of schema {schema!r:.40}; this build reads schema {SCHEMA_VERSION}")
    if type(fields) is not list:
        raise MalformedFrame("fields must be a list")
    expected = _dtypes(tag, fields)
    if names != expected:
        raise MalformedFrame(f"{tag} has arrays of {expected}; found {names!r:.120}")
    if type(sizes) is not list or len(sizes) != len(expected):
        raise MalformedFrame(f"{tag} has {len(expected)} arrays; found sizes {sizes!r:.120}")
    for size in sizes:
        if type(size) is not int or size < 0:
            raise MalformedFrame(f"sizes are counts; found {sizes!r:.120}")
    return tag, fields, names, sizes


def _no_extension(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"a message has no extension types, found {code}")


def _dtypes(tag: str, fields: Sequence[Any]) -> list[str]:
    """The dtypes of a message with this tag; those of a scored group depend on its components. Checks the number of fields."""
    if tag == TRAJECTORY:
        _check(len(fields) == 12, "a trajectory has 12 fields", len(fields))
        return _TRAJECTORY_DTYPES
    _check(len(fields) == 10, "a scored group has 10 fields", len(fields))
    names = fields[3]
    _check(_list_of(names, _is_text) and len(set(names)) == len(names), "components have names, each once", names)
    return _GROUP_DTYPES + [_COMPONENT_DTYPE] * len(names)


def _take_apart(message: Message) -> tuple[bytes, list[Array]]:
    """(header, arrays), every rule checked."""
    values = message.__dict__
    if type(message) is Trajectory:
        tag, fields, arrays = TRAJECTORY, list(_trajectory_fields(values)), list(_trajectory_arrays(values))
    else:
        assert type(message) is ScoredGroup, f"no message: {type(message).__name__}"
        tag, fields, arrays = SCORED_GROUP, list(_group_fields(values)), list(_group_arrays(values))
        fields[3] = list(message.components)
        arrays += message.components.values()
    try:
        names = _dtypes(tag, fields)
        if [array.dtype for array in arrays] != [_DTYPES[name] for name in names] or {array.ndim for array in arrays} != {1}:
            found = [f"{array.dtype}{list(array.shape)}" for array in arrays]
            raise MalformedFrame(f"its arrays are one-dimensional, of {names}; found {found}")
        _check_parts(tag, fields, arrays)
        sizes = [array.size for array in arrays]
        return msgpack.packb([tag, SCHEMA_VERSION, fields, names, sizes], unicode_errors="surrogatepass"), arrays
    except MalformedFrame as error:
        raise MalformedFrame(f"{tag} {message.id}: {error}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedFrame(f"{tag} {message.id} holds a value that cannot travel: {error}") from error


def _put_together(tag: str, fields: list[Any], arrays: list[Array]) -> Message:
    """The message of these parts, every rule checked."""
    if arrays[2].tobytes().translate(None, b"\0\1"):
        raise MalformedFrame("loss_mask holds a byte other than 0 and 1")
    _check_parts(tag, fields, arrays)
    if tag == TRAJECTORY:
        fields[0] = TrajectoryId._make(fields[0])
        return _filled(Trajectory, zip(_TRAJECTORY_PARTS, fields + arrays, strict=True))
    fields[0] = GroupId._make(fields[0])
    fields[3] = dict(zip(fields[3], arrays[len(_GROUP_ARRAYS) :], strict=True))
    return _filled(ScoredGroup, zip(_GROUP_PARTS, fields + arrays[: len(_GROUP_ARRAYS)], strict=True))


def _filled(kind: type[_Kind], values: Iterable[tuple[str, Any]]) -> _Kind:
    """A frozen dataclass, its fields set at once: its own `__init__` sets them one by one, at three times the cost."""
    message = object.__new__(kind)
    message.__dict__.update(values)
    return message


def _check_parts(tag: str, fields: list[Any], arrays: list[Array]) -> None:
    """Every rule of `types` on parts whose number and dtypes are right. Raises MalformedFrame."""
    if tag == TRAJECTORY:
        _check_trajectory(fields, arrays)
    else:
        _check_scored_group(fields, arrays)


def _check_trajectory(fields: list[Any], arrays: list[Array]) -> None:
    (identity, group_size, start_version, finish, prompt, response, truth, extra, messages, calls, seconds, failure) = fields
    num_tokens = _num_tokens(arrays)
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
    if type(extra) is not dict or type(messages) is not list or type(calls) is not list:
        raise MalformedFrame("extra_info is a mapping, messages and tool_calls are lists")
    _check_prompt(prompt)
    _check_json(truth, extra, messages, calls)


def _check_scored_group(fields: list[Any], arrays: list[Array]) -> None:
    (identity, group_size, start_version, _names, finish_reasons, failures, prompt, responses, truth, metrics) = fields
    members, lengths, rewards, *components = arrays[len(_TRAJECTORY_ARRAYS) :]
    _check_identity(identity, 3, group_size, start_version)
    _check_members(members, lengths, group_size, _num_tokens(arrays))
    counts = {members.size, rewards.size, *(component.size for component in components)}
    _check(len(counts) == 1, "rewards and components have one value per member", counts)
    per_member = [(finish_reasons, _is_text), (failures, _is_text_or_none), (responses, _is_text)]
    for values, is_right in per_member:
        _check(_list_of(values, is_right) and len(values) == members.size, "texts are one per member", values)
    unexplained = [bool(bad and failure is None) for bad, failure in zip(np.isnan(rewards), failures, strict=True)]
    _check(not any(unexplained), "a member without a reward has its failure", unexplained)
    _check_prompt(prompt)
    _check_json(truth)
    numbers = type(metrics) is dict and all(map(_is_text, metrics)) and all(map(_is_number, metrics.values()))
    _check(numbers, "metrics are numbers by name", metrics)


def _check(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise MalformedFrame(f"{rule}; found {found!r:.120}")


def _num_tokens(arrays: list[Array]) -> int:
    """Elements of the token arrays, which are all as long."""
    num_tokens = arrays[1].size
    if not num_tokens == arrays[2].size == arrays[3].size == arrays[4].size:
        raise MalformedFrame(f"the token arrays are equally long; found {[array.size for array in arrays[1:5]]}")
    return num_tokens


def _check_identity(identity: Any, length: int, group_size: Any, start_version: Any) -> None:
    if not isinstance(identity, list | tuple) or len(identity) != length or not all(map(_is_count, identity)):
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


def _check_prompt(prompt: Any) -> None:
    if type(prompt) is not str and (type(prompt) is not list or not _is_json(prompt)):
        raise MalformedFrame(f"prompt is text or chat messages of plain values; found {prompt!r:.120}")


def _check_json(*values: Any) -> None:
    for value in values:
        if not _is_json(value):
            raise MalformedFrame(f"ground_truth, extra_info, messages, tool_calls hold plain values; found {value!r:.120}")


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
    if kind not in _CONTAINERS:
        return False
    if not value:
        return True
    if kind is dict:
        return all(map(_is_text, value)) and all(map(_is_json, value.values()))
    return all(map(_is_json, value))
