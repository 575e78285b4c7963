"""The ledger and the journal lie on a local disk, and a network file system is named and refused."""

from __future__ import annotations

import pytest

from asyncrl.errors import UserError
from asyncrl.ledger.file_systems import (
    NETWORK_FILE_SYSTEMS,
    file_system_of,
    make_state_folder,
    refuse_network_file_system,
    state_folder,
)
from asyncrl.ledger.store import FILE_NAME, LedgerWriter, read_samples


@pytest.fixture
def mounts(tmp_path):
    """A list of mounts: the test's folder is local, `net` in it is mounted by the type that is written there."""

    def write(kind):
        path = tmp_path / "mounts"
        lines = [
            "sysfs /sys sysfs rw 0 0", "/dev/vda / ext4 rw 0 0", f"server:/export {tmp_path}/net {kind} rw,vers=4 0 0",
            f"server:/odd {tmp_path}/a\\040b nfs rw 0 0", "malformed",
        ]  # fmt: skip
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.mark.parametrize("kind", sorted(NETWORK_FILE_SYSTEMS))
def test_every_network_file_system_is_refused_with_the_fix(tmp_path, mounts, kind):
    with pytest.raises(UserError, match=r"the ledgers need a disk of this machine.*set cluster\.state_dir"):
        refuse_network_file_system(tmp_path / "net" / "deep" / "run", "the ledgers", mounts=mounts(kind))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk", "fuse.ntfs-3g"])
def test_local_ones_pass(tmp_path, mounts, kind):
    refuse_network_file_system(tmp_path / "net" / "run", "the ledgers", mounts=mounts(kind))


def test_the_deepest_mount_counts_and_of_two_at_one_place_the_later(tmp_path, mounts):
    path = mounts("nfs4")
    assert file_system_of(tmp_path / "net", mounts=path) == "nfs4"
    assert file_system_of(tmp_path / "network", mounts=path) == "ext4"
    assert file_system_of(tmp_path / "a b" / "run", mounts=path) == "nfs"
    path.write_text(path.read_text() + f"/dev/vdb {tmp_path}/net xfs rw 0 0\n")
    assert file_system_of(tmp_path / "net" / "run", mounts=path) == "xfs"


def test_a_link_is_followed_to_where_the_folder_really_lies(tmp_path, mounts):
    (tmp_path / "net").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "net")
    with pytest.raises(UserError, match="NFS"):
        refuse_network_file_system(tmp_path / "link" / "run", "the ledgers", mounts=mounts("nfs"))


def test_without_a_list_of_mounts_nothing_is_refused(tmp_path):
    refuse_network_file_system(tmp_path, "the ledgers", mounts=tmp_path / "absent")


def test_a_run_on_a_network_file_system_keeps_its_state_elsewhere_and_is_read_as_always(tmp_path, mounts):
    run_dir = tmp_path / "net" / "run"
    run_dir.mkdir(parents=True)
    path = mounts("lustre")
    with pytest.raises(UserError, match="Lustre"):
        state_folder(run_dir, None, mounts=path)
    folder = make_state_folder(run_dir, str(tmp_path / "local"), mounts=path)
    assert folder == make_state_folder(run_dir, str(tmp_path / "local"), mounts=path)
    other = tmp_path / "net" / "other" / "run"
    other.mkdir(parents=True)
    assert folder != make_state_folder(other, str(tmp_path / "local"), mounts=path)
    writer = LedgerWriter(folder / FILE_NAME)
    assert read_samples(run_dir)["dispatched"] == 0
    writer.close()
    assert read_samples(run_dir)["dispatched"] == 0
    assert not list(run_dir.glob("*-wal"))


@pytest.mark.parametrize(("before", "now"), [(None, "one"), ("one", None), ("one", "other")])
def test_a_ledger_is_not_left_behind_where_another_state_dir_is_given(tmp_path, before, now):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    at = {None: None, "one": str(tmp_path / "one"), "other": str(tmp_path / "other")}
    writer = LedgerWriter(make_state_folder(run_dir, at[before]) / FILE_NAME)
    writer.close()
    place = (run_dir / FILE_NAME).resolve().parent
    with pytest.raises(UserError, match=f"the run's ledger lies in {place}, but by cluster.state_dir"):
        make_state_folder(run_dir, at[now])
    assert make_state_folder(run_dir, at[before]).resolve() == place


def test_a_run_directory_that_was_moved_is_told_where_its_ledger_lies(tmp_path):
    run_dir, state_dir = tmp_path / "run", str(tmp_path / "local")
    run_dir.mkdir()
    LedgerWriter(make_state_folder(run_dir, state_dir) / FILE_NAME).close()
    moved = run_dir.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="the run's ledger lies in"):
        make_state_folder(moved, state_dir)
    assert read_samples(moved)["dispatched"] == 0


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made.*cluster\.state_dir"):
        make_state_folder(tmp_path / "run", str(tmp_path / "file"))
