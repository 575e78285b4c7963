"""Plain values with numpy arrays in them, as frames: one msgpack frame, and one raw frame per array.

An array stands in the msgpack frame as extension type 1, holding [frame index, dtype, shape]. Tuples arrive as lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from asyncrl.errors import MalformedFrame, TruncatedFrame

_ARRAY = 1
_TIMES = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")  # how msgpack's timestamps begin, which go past the hook
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))}


def pack_values(value: Any) -> list[bytes]:
    """Frames of `value`: None, bool, int, float, str, bytes, list, tuple, dict with str keys, numpy scalars and arrays.

    Raises TypeError for anything else.
    """
    arrays: list[bytes] = []

    def array_or_scalar(item: Any) -> Any:
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, np.ndarray) and item.dtype.str in _DTYPES:
            arrays.append(item.tobytes())
            return msgpack.ExtType(_ARRAY, msgpack.packb([len(arrays), item.dtype.str, item.shape]))
        raise TypeError(f"a message carries plain values and numeric arrays, not {type(item).__name__}")

    return [msgpack.packb(value, default=array_or_scalar, unicode_errors="surrogatepass"), *arrays]


def unpack_values(frames: Sequence[bytes]) -> Any:
    """The value of `pack_values`. Arrays are read-only views of their frames. Raises MalformedFrame or TruncatedFrame."""
    if not frames:
        raise TruncatedFrame("a message needs at least one frame, found none")

    def array(code: int, data: bytes) -> Any:
        if code != _ARRAY:
            raise MalformedFrame(f"unknown extension type {code}")
        index, dtype_text, shape = msgpack.unpackb(data)
        return _view(frames, index, dtype_text, shape)

    header = frames[0]
    try:
        value = msgpack.unpackb(header, ext_hook=array, strict_map_key=False, unicode_errors="surrogatepass")
    except (MalformedFrame, TruncatedFrame):
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"the header is no msgpack value of ours: {error}") from error
    if any(mark in header for mark in _TIMES) and _holds_time(value):
        raise MalformedFrame("a message carries plain values and numeric arrays, no timestamps")
    return value


def _holds_time(value: Any) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, msgpack.Timestamp):
            return True
        left += [*item, *item.values()] if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return False


def _view(frames: Sequence[bytes], index: Any, dtype_text: Any, shape: Any) -> np.ndarray[Any, Any]:
    if type(index) is not int or type(dtype_text) is not str or type(shape) is not list:
        raise MalformedFrame("an array entry must be [frame index, dtype, shape]")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedFrame(f"an array's shape must be sizes of 0 or more, found {shape}")
    if not 1 <= index < len(frames):
        raise TruncatedFrame(f"the header names array frame {index}, but {len(frames) - 1} came")
    dtype = _DTYPES.get(dtype_text)
    if dtype is None:
        raise MalformedFrame(f"the dtype of an array is one of {', '.join(_DTYPES)}, found {dtype_text[:40]!r}")
    expected = math.prod(shape) * dtype.itemsize
    if len(frames[index]) != expected:
        raise TruncatedFrame(f"array frame {index} should have {expected} bytes, found {len(frames[index])}")
    return np.frombuffer(frames[index], dtype=dtype).reshape(shape)
