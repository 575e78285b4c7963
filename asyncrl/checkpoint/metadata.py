"""DCP's `.metadata`, read without running anything that it names.

The file is a pickle of `torch.distributed.checkpoint.metadata.Metadata`, and a pickle can name any function of any module. Here a
name outside DCP's own few is refused; those few become inert stand-ins, made for one reading, that only keep what they are given;
and from the stand-ins, once every value of theirs has the type that DCP gives it, the metadata is built anew.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncrl.errors import CheckpointError

FILE_NAME = ".metadata"
MOST_BYTES = 1 << 30
DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
DCP = "torch.distributed.checkpoint"
DCP_METADATA = f"{DCP}.metadata"
RECORDS = {
    (DCP_METADATA, "Metadata"),
    (DCP_METADATA, "TensorStorageMetadata"),
    (DCP_METADATA, "TensorProperties"),
    (DCP_METADATA, "ChunkStorageMetadata"),
    (DCP_METADATA, "MetadataIndex"),
    (DCP_METADATA, "StorageMeta"),
    (f"{DCP}.filesystem", "_StorageInfo"),
}
VALUES = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (DCP_METADATA, "_MEM_FORMAT_ENCODING"): int,
}
NOT_A_PICKLE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError, OverflowError,
    RecursionError, MemoryError,
)  # fmt: skip


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the checkpoint in `folder`. Raises CheckpointError for a file that is missing, that names anything but
    DCP's own classes, or that does not hold what DCP writes of tensors."""
    file = folder / FILE_NAME
    try:
        if file.stat().st_size > MOST_BYTES:
            raise _wrong(file, f"it has more than {MOST_BYTES} bytes")
        content = file.read_bytes()
    except OSError as error:
        raise _wrong(file, f"it cannot be read ({error.strerror})") from error
    return parse_metadata(content, file)


def parse_metadata(content: bytes, file: Path) -> Metadata:
    """`file` is for messages."""
    unpickler = _Unpickler(content, file)
    try:
        found = unpickler.load()
        return _Builder(unpickler.names).metadata(found)
    except NOT_A_PICKLE as error:
        raise _wrong(file, f"{type(error).__name__}: {error}") from error


def _wrong(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} must be what torch.distributed.checkpoint wrote, and is not: {why}: use another checkpoint")


class _Record:
    """A stand-in for an object: what it was built from, and nothing that could be called."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)


class _Unpickler(pickle.Unpickler):
    """Admits the names of RECORDS, VALUES and DTYPES. The classes that it hands out live as long as one reading."""

    def __init__(self, content: bytes, file: Path):
        super().__init__(io.BytesIO(content))
        self._file = file
        self.names: dict[type, str] = {}
        self._admitted: dict[tuple[str, str], Any] = {("torch", name): ("dtype", name) for name in DTYPES}
        for place, base in (*((place, _Record) for place in RECORDS), *VALUES.items()):
            stand_in = type(place[1], (base,), {})
            self._admitted[place] = stand_in
            self.names[stand_in] = place[1]
        self._admitted["builtins", "getattr"] = self._member

    def _member(self, enumeration: Any, name: Any) -> None:
        """How Python 3.11.0 to 3.11.3 write a member of an enumeration, where later ones call it with a value. What it is means
        nothing to a reader; `getattr` of anything else is refused."""
        if not isinstance(enumeration, type) or (DCP_METADATA, self.names.get(enumeration)) not in VALUES:
            raise _wrong(self._file, "it names builtins.getattr, which is no class of DCP's")

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._admitted[module, name]
        except KeyError:
            raise _wrong(self._file, f"it names {module}.{name}, which is no class of DCP's") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _wrong(self._file, "it refers to something outside")


class _Builder:
    """From stand-ins to DCP's classes. TypeError for whatever has another type than DCP's."""

    def __init__(self, names: Mapping[type, str]):
        self._names = names

    def metadata(self, record: Any) -> Metadata:
        fields = self._fields(record, "Metadata")
        tensors, places = _typed(fields["state_dict_metadata"], dict), _typed(fields["storage_data"], dict)
        if fields.get("planner_data") is not None:
            raise TypeError("it holds planner data, and asyncrl writes none")
        return Metadata(
            state_dict_metadata={_typed(name, str): self._tensor(tensor) for name, tensor in tensors.items()},
            storage_data={self._index(index): self._place(place) for index, place in places.items()},
            storage_meta=StorageMeta(),
            version=_optional(fields.get("version"), str),
        )

    def _tensor(self, record: Any) -> TensorStorageMetadata:
        fields = self._fields(record, "TensorStorageMetadata")
        chunks = [self._fields(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
        return TensorStorageMetadata(
            properties=self._properties(fields["properties"]),
            size=self._size(fields["size"]),
            chunks=[ChunkStorageMetadata(self._size(chunk["offsets"]), self._size(chunk["sizes"])) for chunk in chunks],
        )

    def _properties(self, record: Any) -> TensorProperties:
        """Of them only the dtype means anything to a reader."""
        dtype, *_ = _typed(self._state(record, "TensorProperties"), tuple)
        kind, name = _typed(dtype, tuple)
        if kind != "dtype":
            raise TypeError(f"a dtype is expected, not {dtype!r:.80}")
        return TensorProperties(dtype=DTYPES[name])

    def _index(self, record: Any) -> MetadataIndex:
        fields = self._fields(record, "MetadataIndex")
        offset = fields.get("offset")
        return MetadataIndex(
            _typed(fields["fqn"], str), None if offset is None else self._size(offset), _optional(fields.get("index"), int)
        )

    def _place(self, record: Any) -> _StorageInfo:
        fields = self._fields(record, "_StorageInfo")
        path = _typed(fields["relative_path"], str)
        if not DATA_FILE.fullmatch(path):
            raise ValueError(f"tensors lie in files such as __0_0.distcp, not {path!r:.80}")
        if fields.get("transform_descriptors") is not None:
            raise TypeError("its tensors are transformed, and asyncrl writes them as they are")
        return _StorageInfo(path, _natural(fields["offset"]), _natural(fields["length"]))

    def _size(self, value: Any) -> torch.Size:
        if self._names.get(type(value)) != "Size":
            raise TypeError(f"a torch.Size is expected, not {value!r:.80}")
        return torch.Size([_natural(extent) for extent in value])

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        fields: dict[str, Any] = _typed(self._state(record, name), dict)
        return fields

    def _state(self, record: Any, name: str) -> Any:
        if self._names.get(type(record)) != name:
            raise TypeError(f"a {name} is expected, not {record!r:.80}")
        return record.state


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, not {value!r:.80}")
    return value


def _optional(value: Any, kind: type) -> Any:
    return None if value is None else _typed(value, kind)


def _natural(value: Any) -> int:
    if _typed(value, int) < 0 or value >= 1 << 63:
        raise ValueError(f"a size or an offset is at least 0, not {value}")
    return int(value)
