"""Where the run's state lies: the ledger and the queue's journal, on a disk of this machine.

A network file system does not keep what SQLite and a journal need: locks and shared memory that hold, writes that are there when
they are said to be. So it is recognised, and refused with the fix.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.ledger.record import FILE_NAME

JOURNAL_FOLDER = "journal"
MOUNTS = Path("/proc/mounts")
NETWORK_FILE_SYSTEMS = {
    "nfs": "NFS", "nfs4": "NFS", "cifs": "SMB", "smb3": "SMB", "smbfs": "SMB", "ncpfs": "NCP", "afs": "AFS", "coda": "Coda",
    "9p": "a 9P share", "virtiofs": "a virtiofs share", "lustre": "Lustre", "gpfs": "GPFS", "mmfs": "GPFS", "beegfs": "BeeGFS",
    "beegfs_nodev": "BeeGFS", "panfs": "PanFS", "pvfs2": "OrangeFS", "orangefs": "OrangeFS", "wekafs": "WekaFS", "ceph": "CephFS",
    "gfs": "GFS", "gfs2": "GFS", "ocfs2": "OCFS2", "glusterfs": "GlusterFS", "davfs": "WebDAV", "vboxsf": "a VirtualBox share",
    "vmhgfs": "a VMware share", "prl_fs": "a Parallels share",
    "fuse.sshfs": "SSHFS", "fuse.glusterfs": "GlusterFS", "fuse.ceph": "CephFS", "fuse.ceph-fuse": "CephFS",
    "fuse.juicefs": "JuiceFS", "fuse.s3fs": "S3", "fuse.goofys": "S3", "fuse.mount-s3": "S3", "fuse.mountpoint-s3": "S3",
    "fuse.gcsfuse": "Google Cloud Storage", "fuse.blobfuse": "Azure Blob Storage", "fuse.blobfuse2": "Azure Blob Storage",
    "fuse.rclone": "rclone", "fuse.davfs2": "WebDAV", "fuse.curlftpfs": "FTP", "fuse.vmhgfs-fuse": "a VMware share",
    "fuse.moosefs": "MooseFS", "fuse.mfs": "MooseFS", "fuse.lizardfs": "LizardFS", "fuse.seaweedfs": "SeaweedFS",
    "fuse.alluxio-fuse": "Alluxio", "fuse.hdfs": "HDFS", "fuse.quobyte": "Quobyte", "fuse.wekafs": "WekaFS",
}  # fmt: skip
"""Type in /proc/mounts → name. Other types of FUSE are local as a rule (ntfs-3g, overlay, encryption) and are let pass."""


def refuse_network_file_system(folder: Path, what: str, *, mounts: Path = MOUNTS) -> None:
    """Raises UserError when `folder` (which need not be there yet) lies on a network file system. `what`: what is to be kept
    there, in the plural. Where the system has no list of mounts, nothing is known and nothing refused."""
    kind = NETWORK_FILE_SYSTEMS.get(file_system_of(folder, mounts=mounts))
    if kind is not None:
        raise UserError(
            f"{what} need a disk of this machine, but {folder} lies on a network file system ({kind}): "
            "set cluster.state_dir to a folder on a local disk"
        )


def file_system_of(folder: Path, *, mounts: Path = MOUNTS) -> str:
    """The type that /proc/mounts gives for the mount in which this folder lies; "" where that is not known."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real = os.path.realpath(folder)
    best, found = -1, ""
    for mount_point, kind in _mounts(lines):
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= best:  # of two at one place the later hides the other
            best, found = len(mount_point), kind
    return found


def state_folder(run_dir: Path, state_dir: str | None, *, mounts: Path = MOUNTS) -> Path:
    """The folder of this run's ledger and journal; nothing is created. In `state_dir` it is named by the run directory's name and
    place. Raises UserError for a network file system."""
    if state_dir is None:
        folder = run_dir
    else:
        real = Path(os.path.realpath(run_dir))
        place = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
        folder = Path(state_dir).expanduser().absolute() / f"{real.name}-{place}"
    refuse_network_file_system(folder, "the ledger and the queue's journal", mounts=mounts)
    return folder


def make_state_folder(run_dir: Path, state_dir: str | None, *, mounts: Path = MOUNTS) -> Path:
    """As `state_folder`, and there when the call returns. The run directory has a link to a ledger that lies elsewhere, so that
    whoever reads a run finds it. Raises UserError for a folder that cannot be made, or where the run's ledger lies elsewhere: by
    another cluster.state_dir, or because the run directory was moved."""
    folder = state_folder(run_dir, state_dir, mounts=mounts)
    refuse_another_ledger(run_dir, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        link = run_dir / FILE_NAME
        if folder != run_dir and not (link.is_symlink() and Path(os.readlink(link)) == folder / FILE_NAME):
            link.unlink(missing_ok=True)
            link.symlink_to(folder / FILE_NAME)
    except OSError as error:
        raise UserError(
            f"the folder {folder} for the ledger and the queue's journal cannot be made ({error.strerror}): mend access there, "
            "or name another place in cluster.state_dir"
        ) from error
    return folder


def refuse_another_ledger(run_dir: Path, folder: Path) -> None:
    """Raises UserError where the run in `run_dir` has a ledger that does not lie in `folder`: without it nobody knows what was
    done."""
    found = run_dir / FILE_NAME
    if not found.exists():
        return
    place = Path(os.path.realpath(found)).parent
    if place != Path(os.path.realpath(folder)):
        raise UserError(
            f"the run's ledger lies in {place}, but by cluster.state_dir it would lie in {folder}: set cluster.state_dir to what "
            f"it was, or move {FILE_NAME} and {JOURNAL_FOLDER}/ there and remove {found} where it is a link"
        )


def _mounts(lines: list[str]) -> Iterator[tuple[str, str]]:
    """(mount point, type): blanks in a name are written as three octal digits."""
    for line in lines:
        parts = line.split(" ")
        if len(parts) >= 3:
            yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[1]), parts[2]
