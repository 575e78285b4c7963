"""Named tensors in the files of a folder, by torch.distributed.checkpoint: `protocols.StateFiles`.

Written by every rank at once (each its shards, into a file of its own) or by one process; read by any number of ranks, each for
itself, without a process group. Nothing but tensors goes in: no pickled object lies in the files but `.metadata`, which
`asyncrl.checkpoint.metadata` reads.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncrl.checkpoint.durable import in_words
from asyncrl.checkpoint.folders import WRITING
from asyncrl.checkpoint.metadata import read_metadata
from asyncrl.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPE_PREFIX = "torch."
UNREADABLE = (pickle.UnpicklingError, zipfile.BadZipFile, EOFError)


class _Writer(FileSystemWriter):
    """DCP's, with nothing in the metadata that is not DCP's own: no path of the folder's first name."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """torch.save answers a refused write with an error of its own; the system's is the one that says why, and only the error
        itself travels to the other ranks, not what it was raised from."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            refused = next((cause for cause in _causes(error) if isinstance(cause, OSError)), None)
            raise (refused or error) from None


class DcpFiles:
    """`protocols.StateFiles` on DCP."""

    def write(self, folder: str, tensors: Mapping[str, torch.Tensor], group: ProcessGroup | None) -> None:
        """On the disk (fsync) when it returns, but for the folder's own entry. Raises CheckpointError on every rank of the group
        when one rank fails."""
        writer = _Writer(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0, overwrite=False)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        try:
            if group is None:
                _write_alone(dict(tensors), writer, planner)
            else:
                dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
        except (dcp.CheckpointException, OSError, RuntimeError) as error:
            raise explained(error, folder) from error

    def describe(self, folder: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of every tensor by name. Raises CheckpointError for a folder whose files are not DCP's, or not whole."""
        metadata = read_metadata(Path(folder))
        _check_files(Path(folder), metadata)
        found = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "read_metadata admits tensors only"
            found[name] = (tuple(tensor.size), str(tensor.properties.dtype).removeprefix(DTYPE_PREFIX))
        return found

    def read(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Into these tensors, in place; of a DTensor this rank's shard. Raises CheckpointError for a tensor that is not there, or
        of another shape, and for bytes that cannot be read."""
        metadata = read_metadata(Path(folder))
        _check_files(Path(folder), metadata)
        reader = FileSystemReader(folder)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        try:
            planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
            reader.set_up_storage_reader(metadata, True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except (*UNREADABLE, OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
            why = "its bytes are none" if isinstance(error, UNREADABLE) else f"{type(error).__name__}: {_first_line(error)}"
            raise CheckpointError(
                f"a checkpoint gives back every tensor that was put in, and {folder} does not ({why}): use another checkpoint"
            ) from error


def explained(error: BaseException, folder: str) -> CheckpointError:
    """The error that DCP wrapped, in words: the operating system's where there is one."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno is not None:
            return in_words(cause, WRITING, folder)
    said = _first_line(causes[-1]) if causes else _first_line(error)
    return CheckpointError(
        f"{WRITING} as a whole or not at all, and writing {folder} failed: {said}: look at its disk and at the log"
    )


def _write_alone(tensors: dict[str, Any], writer: FileSystemWriter, planner: DefaultSavePlanner) -> None:
    """What `dcp.save` does on one process that has no group."""
    planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    writes = writer.write_data(planner.finish_plan(plan), planner)
    writes.wait()
    writer.finish(metadata, [writes.value()])


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Every file that the metadata speaks of is there and long enough."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise in_words(error, "a checkpoint is read", folder) from error
        if size < end:
            raise CheckpointError(f"a checkpoint is whole, and {folder / name} has {size} of {end} bytes: use another checkpoint")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors inside, outermost first: of every rank, and what each was raised from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        here = waiting.pop(0)
        if id(here) in seen:
            continue
        seen.add(id(here))
        yield here
        if isinstance(here, dcp.CheckpointException):
            waiting += [failure[0] if isinstance(failure, tuple) else failure for failure in here.failures.values()]
        waiting += [inner for inner in (here.__cause__, here.__context__) if inner is not None]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
