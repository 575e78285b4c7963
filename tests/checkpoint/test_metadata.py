"""DCP's metadata is read as data: nothing that it names is run, nothing but DCP's own passes."""

from __future__ import annotations

import enum
import io
import os
import pathlib
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.checkpoint.metadata import parse_metadata, read_metadata
from asyncrl.errors import CheckpointError

TENSORS = {"model.w": torch.ones(3, 4), "rng.0.torch": torch.arange(5, dtype=torch.uint8), "step": torch.tensor(2.0)}
FILE = Path("checkpoint/.metadata")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("saved")
    DcpFiles().write(str(made), TENSORS, None)
    return made


@pytest.fixture(scope="module")
def content(folder):
    return (folder / ".metadata").read_bytes()


def dcps_own(content) -> Metadata:
    return pickle.loads(content)


def test_what_is_read_is_what_dcp_itself_would_read(folder, content):
    mine, theirs = read_metadata(folder), dcps_own(content)
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.storage_data == theirs.storage_data
    assert mine.version == theirs.version


class _ByName(pickle.Pickler):
    """Writes the members of enumerations by their names, as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_what_other_pythons_write_of_an_enumeration_is_read_too(folder, content):
    written = io.BytesIO()
    _ByName(written).dump(dcps_own(content))
    assert b"getattr" in written.getvalue()
    assert parse_metadata(written.getvalue(), FILE) == read_metadata(folder)


@pytest.mark.parametrize("owner", [torch.Size, Metadata, MetadataIndex], ids=lambda owner: owner.__name__)
def test_an_attribute_of_anything_but_an_enumeration_is_refused(content, owner):
    metadata = dcps_own(content)
    metadata.storage_data["index"] = Evil(getattr, owner, "__init__")
    with pytest.raises(CheckpointError, match="no class of DCP's"):
        parse_metadata(pickle.dumps(metadata), FILE)


class Evil:
    """Pickled, a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_that_runs_a_command_is_refused_by_name_and_runs_nothing(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(os.system, f"touch {tmp_path}/owned")))
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system, which is no class of DCP's"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="no class of DCP's"):
        DcpFiles().read(str(tmp_path), {})
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


@pytest.mark.parametrize(
    "evil",
    [
        Evil(eval, "1"),
        Evil(pathlib.Path, "x"),
        Evil(torch.load, "x"),
        Evil(getattr, "text", "upper"),
        Evil(torch.serialization.add_safe_globals, []),
    ],
    ids=lambda evil: evil.call[0].__name__,
)
@pytest.mark.parametrize("place", ["whole", "planner", "key", "dtype"])
def test_a_name_outside_dcp_is_refused_wherever_it_stands(content, evil, place):
    metadata = dcps_own(content)
    match place:
        case "planner":
            metadata.planner_data = {"mapping": evil}
        case "key":
            metadata.storage_data[evil] = None
        case "dtype":
            metadata.state_dict_metadata["model.w"].properties.dtype = evil
    with pytest.raises(CheckpointError, match="no class of DCP's"):
        parse_metadata(pickle.dumps(evil if place == "whole" else metadata), FILE)


def bytes_entry(metadata):
    metadata.state_dict_metadata["evil"] = BytesStorageMetadata()


def path_outside(metadata):
    metadata.storage_data[MetadataIndex("model.w", [0, 0])] = _StorageInfo("../../secret", 0, 10)


def negative_offset(metadata):
    metadata.storage_data[MetadataIndex("model.w", [0, 0])] = _StorageInfo("__0_0.distcp", -1, 10)


def transformed(metadata):
    metadata.storage_data[MetadataIndex("model.w", [0, 0])] = _StorageInfo("__0_0.distcp", 0, 10, ["zlib"])


def text_for_size(metadata):
    metadata.state_dict_metadata["model.w"].size = "3"


def planner_data(metadata):
    metadata.planner_data = {"model.w": ("model", "w")}


@pytest.mark.parametrize("change", [bytes_entry, path_outside, negative_offset, transformed, text_for_size, planner_data])
def test_what_asyncrl_does_not_write_is_not_read(content, change):
    metadata = dcps_own(content)
    change(metadata)
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        parse_metadata(pickle.dumps(metadata), FILE)


def test_a_name_given_new_attributes_changes_no_class_of_dcps(content):
    """BUILD on a class would set its attributes: the classes here are the reading's own."""
    before = dict(vars(Metadata))
    attack = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x04\x00\x00\x00evilK\x01stb."
    with pytest.raises(CheckpointError):
        parse_metadata(attack, FILE)
    assert dict(vars(Metadata)) == before


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_mutated_file_gives_metadata_or_a_checkpoint_error(content, data):
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    try:
        found = parse_metadata(bytes(changed[: cut or None]), FILE)
    except CheckpointError:
        return
    assert type(found) is Metadata


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"\.metadata must be what torch.distributed.checkpoint wrote.*No such file"):
        read_metadata(tmp_path)
