"""Messages as bytes: a msgpack header and raw arrays, as frames or as one payload.

    header  = [tag, schema version, [field, …], [count, …]]        counts: prompt tokens P, tokens T;
                                                                   of a group also members n, tokens that a teacher judged
    frames  = [header, array, array, …]
    payload = header's length (8 bytes), header, padding, array, array, …, padding

Fields and arrays stand in the order of the tables below. Each array has one dimension, and its size follows from the counts.
Arrays of int32 come first, then those of float32, last the mask, a byte per token: with the header padded to 8 bytes all are
aligned. Numbers are little-endian. What `decode` and `from_payload` return has the types, dtypes and shapes that `types`
promises, or they raise a FrameError: garbage never becomes a message. A message that would be refused there is refused by
`encode` and `to_payload`, so that the mistake shows where it was made.

The payload stands on the hot path, twice per trajectory. Hence the few plain ways to save time: arrays are slices of one view
of the payload, tables replace attribute lists, a dataclass is filled at once, each kind of message has a way of its own, and one
packer serves everybody (what it packs are plain types, checked before: it runs no Python code, so threads cannot meet in it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrl.errors import MalformedFrame, OversizedFrame, TruncatedFrame, UnknownSchema, UnknownTag
from asyncrl.messages.types import GreedyResponse, GroupId, ScoredGroup, Trajectory, TrajectoryId

SCHEMA_VERSION = 3
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
    "metrics", "greedy",
)  # fmt: skip
_TRAJECTORY_ARRAYS = ("prompt_tokens", "response_tokens", "versions", "log_probs", "loss_mask")
_GROUP_ARRAYS = (
    "prompt_tokens", "response_tokens", "versions", "members", "lengths", "log_probs", "teacher_log_probs", "rewards",
    "loss_mask",
)  # fmt: skip
_NUM_GROUP_INTS = 5
_BEFORE_COMPONENTS = 8  # of a group's arrays: then comes one per component, whose names are a field, then the mask

_INT32, _FLOAT32, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype("|b1")
_TRAJECTORY_DTYPES = [_INT32] * 3 + [_FLOAT32, _BOOL]
_NUM_FIELDS = {TRAJECTORY: len(_TRAJECTORY_FIELDS), SCORED_GROUP: len(_GROUP_FIELDS)}
_NUM_COUNTS = {TRAJECTORY: 2, SCORED_GROUP: 4}
_FINISH_REASONS = frozenset(("stop", "length", "abort", "failed"))
_SCALARS = frozenset((type(None), bool, int, float, str))
_CONTAINERS = frozenset((list, tuple, dict))
_PADDING = [bytes(-size % 8) for size in range(8)]
_LENGTH = Struct("<Q")
_TOKEN_BYTES = sum(dtype.itemsize for dtype in _TRAJECTORY_DTYPES[1:])  # of a trajectory's arrays, per response token

_trajectory_fields, _trajectory_arrays = itemgetter(*_TRAJECTORY_FIELDS), itemgetter(*_TRAJECTORY_ARRAYS)
_group_fields, _group_arrays = itemgetter(*_GROUP_FIELDS), itemgetter(*_GROUP_ARRAYS)
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
_pack = msgpack.Packer(unicode_errors="surrogatepass").pack


def envelope(message: Message) -> tuple[str, str]:
    """(message id, group id) as text: what the queue knows of a message."""
    if type(message) is Trajectory:
        epoch, row, attempt, member = message.id
        group = f"{epoch}/{row}/{attempt}"
        return f"{group}/{member}", group
    return str(message.id), str(message.id)


def encode(message: Message) -> list[bytes]:
    """The frames of a message. Raises MalformedFrame for one that `decode` would refuse, with its id and what is wrong."""
    header, arrays, _ = _take_apart(message)
    return [header, *(array.tobytes() for array in arrays)]


def to_payload(message: Message) -> bytes:
    """The message as one payload. Raises as `encode`."""
    header, arrays, num_bytes = _take_apart(message)
    parts: list[Any] = [_LENGTH.pack(len(header)), header, _PADDING[len(header) & 7]]
    parts += map(np.ascontiguousarray, arrays)
    parts.append(_PADDING[num_bytes & 7])
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
    tag, fields, counts = _header(frames[0])
    dtypes, sizes = _dtypes_and_sizes(tag, fields, counts)
    found = [len(frame) for frame in frames[1:]]
    if found != [count * dtype.itemsize for dtype, count in zip(dtypes, sizes, strict=True)]:
        raise TruncatedFrame(f"{tag} announces arrays of {sizes!r:.80} elements; frames of {found} bytes came")
    arrays = [np.frombuffer(frame, dtype) for frame, dtype in zip(frames[1:], dtypes, strict=True)]
    return _trajectory(fields, arrays) if tag == TRAJECTORY else _scored_group(fields, arrays)


def from_payload(payload: Frame) -> Message:
    """The message of this payload; its arrays are read-only views of it. Raises as `decode`."""
    view = memoryview(payload)
    if len(view) < _LENGTH.size or len(view) % 8:
        raise TruncatedFrame(f"a payload is a multiple of 8 bytes, found {len(view)}")
    (header_bytes,) = _LENGTH.unpack_from(view)
    header_end = _LENGTH.size + header_bytes
    start = header_end + 7 & -8
    if start > len(view):
        raise TruncatedFrame(f"the payload announces a header of {header_bytes} bytes and has {len(view)} in all")
    tag, fields, counts = _header(view[_LENGTH.size : header_end])
    if tag == TRAJECTORY:
        return _trajectory(fields, _cut_trajectory(view, start, counts))
    return _scored_group(fields, _cut_scored_group(view, start, fields, counts))


def _cut_trajectory(view: memoryview, start: int, counts: list[int]) -> list[Array]:
    """The arrays that begin at byte `start` and fill the payload."""
    num_prompt, num_tokens = counts
    prompt = start // 4  # from here on in elements of 4 bytes
    tokens = prompt + num_prompt
    versions = tokens + num_tokens
    log_probs = versions + num_tokens
    mask = log_probs + num_tokens
    _check_end(view, 4 * mask + num_tokens)
    ints = np.frombuffer(view, _INT32)
    floats, bools = ints[log_probs:mask].view(_FLOAT32), ints[mask:].view(_BOOL)
    return [ints[prompt:tokens], ints[tokens:versions], ints[versions:log_probs], floats, bools[:num_tokens]]


def _cut_scored_group(view: memoryview, start: int, fields: list[Any], counts: list[int]) -> list[Array]:
    """As `_cut_trajectory`."""
    _, sizes = _dtypes_and_sizes(SCORED_GROUP, fields, counts)
    bounds = list(accumulate(sizes[:-1], initial=start // 4))  # of the arrays before the mask, in elements of 4 bytes
    mask = bounds[-1]
    _check_end(view, 4 * mask + sizes[-1])
    ints = np.frombuffer(view, _INT32)
    floats, bools = ints.view(_FLOAT32), ints[mask:].view(_BOOL)
    arrays: list[Array] = [ints[first:end] for first, end in pairwise(bounds[: _NUM_GROUP_INTS + 1])]
    return [*arrays, *(floats[first:end] for first, end in pairwise(bounds[_NUM_GROUP_INTS:])), bools[: sizes[-1]]]


def _check_end(view: memoryview, end: int) -> None:
    if end + 7 & -8 != len(view):
        raise TruncatedFrame(f"the payload announces {end} bytes, found {len(view)}")


def _header(frame: Frame) -> tuple[str, list[Any], list[int]]:
    """(tag, fields, counts): as many fields as the tag has, and counts that are counts."""
    try:
        header = msgpack.unpackb(frame, unicode_errors="surrogatepass", ext_hook=_no_extension)
    except MalformedFrame:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"the header is not msgpack: {error}") from error
    if type(header) is not list or len(header) != 4:
        raise MalformedFrame("the header must be [tag, schema version, fields, counts]")
    tag, schema, fields, counts = header
    if tag not in (TRAJECTORY, SCORED_GROUP):
        raise UnknownTag(f"the header names {tag!r:.40}; known are {TRAJECTORY} and {SCORED_GROUP}")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise UnknownSchema(f"{tag} of schema {schema!r:.40}; this build reads schema {SCHEMA_VERSION}")
    if type(fields) is not list or len(fields) != _NUM_FIELDS[tag]:
        raise MalformedFrame(f"{tag} has {_NUM_FIELDS[tag]} fields in a list; found {fields!r:.120}")
    if type(counts) is not list or len(counts) != _NUM_COUNTS[tag] or not _are_counts(counts):
        raise MalformedFrame(f"{tag} has {_NUM_COUNTS[tag]} counts, each at least 0; found {counts!r:.120}")
    return tag, fields, counts


def _no_extension(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"a message has no extension types, found {code}")


def _dtypes_and_sizes(tag: str, fields: Sequence[Any], counts: Sequence[int]) -> tuple[list[np.dtype[Any]], list[int]]:
    """Of each array, in their order. How many a scored group has depends on the names of its components, which are checked."""
    if tag == TRAJECTORY:
        prompt, tokens = counts
        return _TRAJECTORY_DTYPES, [prompt, tokens, tokens, tokens, tokens]
    prompt, tokens, members, judged = counts
    names = fields[3]
    _check(_list_of(names, _is_text) and len(set(names)) == len(names), "components have names, each once", names)
    of_members = 1 + len(names)  # rewards and components
    dtypes = [_INT32] * _NUM_GROUP_INTS + [_FLOAT32] * (2 + of_members) + [_BOOL]
    return dtypes, [prompt, tokens, tokens, members, members, tokens, judged] + [members] * of_members + [tokens]


def _take_apart(message: Message) -> tuple[bytes, Sequence[Array], int]:
    """(header, arrays, bytes of the arrays), every rule checked."""
    is_trajectory = type(message) is Trajectory
    assert is_trajectory or type(message) is ScoredGroup, f"no message: {type(message).__name__}"
    tag, take = (TRAJECTORY, _take_trajectory) if is_trajectory else (SCORED_GROUP, _take_scored_group)
    try:
        return take(message.__dict__)
    except MalformedFrame as error:
        raise MalformedFrame(f"{tag} {message.id}: {error}") from None
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedFrame(f"{tag} {message.id} holds a value that cannot travel: {error}") from error


def _take_trajectory(values: dict[str, Any]) -> tuple[bytes, Sequence[Array], int]:
    fields, arrays = _trajectory_fields(values), _trajectory_arrays(values)
    num_prompt, num_tokens = arrays[0].size, arrays[1].size
    of_tokens = (num_tokens,)
    _check_arrays(arrays, _TRAJECTORY_DTYPES, [(num_prompt,), of_tokens, of_tokens, of_tokens, of_tokens])
    _check_trajectory(fields, num_tokens)
    header = _pack((TRAJECTORY, SCHEMA_VERSION, fields, (num_prompt, num_tokens)))
    return header, arrays, 4 * num_prompt + _TOKEN_BYTES * num_tokens


def _take_scored_group(values: dict[str, Any]) -> tuple[bytes, Sequence[Array], int]:
    fields, arrays = list(_group_fields(values)), list(_group_arrays(values))
    components = fields[3]
    fields[3] = list(components)
    arrays[_BEFORE_COMPONENTS:_BEFORE_COMPONENTS] = components.values()
    counts = (arrays[0].size, arrays[1].size, arrays[3].size, arrays[6].size)
    dtypes, sizes = _dtypes_and_sizes(SCORED_GROUP, fields, counts)
    _check_arrays(arrays, dtypes, [(size,) for size in sizes])
    _check_scored_group(fields, arrays)
    return _pack((SCORED_GROUP, SCHEMA_VERSION, fields, counts)), arrays, 4 * sum(sizes[:-1]) + sizes[-1]


def _check_arrays(arrays: Sequence[Array], dtypes: list[np.dtype[Any]], shapes: list[tuple[int]]) -> None:
    if list(map(_dtype_of, arrays)) == dtypes and list(map(_shape_of, arrays)) == shapes:
        return
    found = [f"{array.dtype}{list(array.shape)}" for array in arrays]
    raise MalformedFrame(
        f"arrays are one-dimensional, of {[dtype.str for dtype in dtypes]}; those of tokens are equally long, rewards and "
        f"components have one value per member; found {found}"
    )


def _trajectory(fields: list[Any], arrays: list[Array]) -> Trajectory:
    """The message of these parts, every rule checked."""
    prompt_tokens, response_tokens, versions, log_probs, loss_mask = arrays
    _check_mask(loss_mask)
    _check_trajectory(fields, response_tokens.size)
    identity, group_size, start_version, finish, prompt, response, truth, extra, messages, calls, seconds, failure = fields
    return _filled(
        Trajectory,
        {
            "id": TrajectoryId._make(identity),
            "group_size": group_size,
            "start_version": start_version,
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "loss_mask": loss_mask,
            "log_probs": log_probs,
            "versions": versions,
            "finish_reason": finish,
            "prompt": prompt,
            "response": response,
            "ground_truth": truth,
            "extra_info": extra,
            "messages": messages,
            "tool_calls": calls,
            "generate_seconds": seconds,
            "failure": failure,
        },
    )


def _scored_group(fields: list[Any], arrays: list[Array]) -> ScoredGroup:
    """As `_trajectory`."""
    _check_mask(arrays[-1])
    _check_scored_group(fields, arrays)
    fields[0] = GroupId._make(fields[0])
    fields[3] = dict(zip(fields[3], arrays[_BEFORE_COMPONENTS:-1], strict=True))
    fields[-1] = None if fields[-1] is None else GreedyResponse._make(fields[-1])
    del arrays[_BEFORE_COMPONENTS:-1]
    return _filled(ScoredGroup, dict(zip(_GROUP_FIELDS + _GROUP_ARRAYS, fields + arrays, strict=True)))


def _check_mask(loss_mask: Array) -> None:
    if loss_mask.tobytes().translate(None, b"\0\1"):
        raise MalformedFrame("loss_mask holds a byte other than 0 and 1")


def _filled(kind: type[_Kind], values: dict[str, Any]) -> _Kind:
    """A frozen dataclass, its fields set at once: its own `__init__` sets them one by one, at three times the cost."""
    message = object.__new__(kind)
    object.__setattr__(message, "__dict__", values)
    return message


def _check_trajectory(fields: Sequence[Any], num_tokens: int) -> None:
    (identity, group_size, start_version, finish, prompt, response, truth, extra, messages, calls, seconds, failure) = fields
    _check_identity(identity, 4, group_size, start_version)
    if identity[3] > group_size:
        raise MalformedFrame(f"member is at most group_size {group_size}, which is the greedy response; found {identity}")
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
    if type(prompt) is not str:
        _check_prompt(prompt)
    if extra or messages or calls or type(truth) not in _SCALARS:
        _check_json(truth, extra, messages, calls)


def _check_scored_group(fields: Sequence[Any], arrays: Sequence[Array]) -> None:
    (identity, group_size, start_version, _names, finish_reasons, failures, prompt, responses, truth, metrics, greedy) = fields
    _, tokens, _, members, lengths, _, judged, rewards, *_ = arrays
    _check_identity(identity, 3, group_size, start_version)
    _check_members(members, lengths, group_size, tokens.size)
    _check(judged.size in (0, tokens.size), "a teacher judges every token or none", judged.size)
    per_member = [(finish_reasons, _is_text), (failures, _is_text_or_none), (responses, _is_text)]
    for values, is_right in per_member:
        _check(_list_of(values, is_right) and len(values) == members.size, "texts are one per member", values)
    unexplained = [bool(bad and failure is None) for bad, failure in zip(np.isnan(rewards), failures, strict=True)]
    _check(not any(unexplained), "a member without a reward has its failure", unexplained)
    _check_prompt(prompt)
    _check_json(truth)
    numbers = type(metrics) is dict and all(map(_is_text, metrics)) and all(map(_is_number, metrics.values()))
    _check(numbers, "metrics are numbers by name", metrics)
    _check(greedy is None or _is_greedy(greedy), "greedy is a finite reward, the oldest and the newest version", greedy)


def _check(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise MalformedFrame(f"{rule}; found {found!r:.120}")


def _check_identity(identity: Any, length: int, group_size: Any, start_version: Any) -> None:
    if not isinstance(identity, (list, tuple)) or len(identity) != length or not _are_counts(identity):
        raise MalformedFrame(f"an id is {length} counts; found {identity!r:.80}")
    if type(group_size) is not int or group_size < 1:
        raise MalformedFrame(f"group_size is at least 1; found {group_size!r:.40}")
    if type(start_version) is not int or start_version < 0:
        raise MalformedFrame(f"start_version is at least 0; found {start_version!r:.40}")


def _check_members(members: Array, lengths: Array, group_size: int, num_tokens: int) -> None:
    present, spans = members.tolist(), lengths.tolist()
    ascending = all(low < high for low, high in pairwise(present))
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


def _are_counts(values: Iterable[Any]) -> bool:
    for value in values:  # noqa: SIM110 (`all` of a generator takes twice as long)
        if type(value) is not int or value < 0:
            return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, (int, float)) and type(value) is not bool)


def _is_greedy(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    reward, *versions = value
    return type(reward) is float and math.isfinite(reward) and _are_counts(versions)


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
