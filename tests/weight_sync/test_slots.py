"""Staging slots in shared memory."""

from __future__ import annotations

import os

import pytest

from asyncrl.errors import SyncError
from asyncrl.weight_sync.slots import SHARED_MEMORY, SlotMaps, create_slot, remove_slot, slot_name


@pytest.fixture
def name():
    name = slot_name(f"test{os.getpid()}", 0, 0)
    yield name
    remove_slot(name)


def test_a_reader_sees_what_the_writer_writes(name):
    memory = create_slot(name, 100)
    maps = SlotMaps()
    view = maps.open(name)
    memory[3] = 7
    assert view[3] == 7
    assert view.readonly
    assert (SHARED_MEMORY / name).stat().st_mode & 0o077 == 0


def test_a_slot_of_a_new_start_is_another_file_and_is_read_anew(name):
    create_slot(name, 100)[0] = 1
    maps = SlotMaps()
    old = maps.open(name)
    create_slot(name, 200)[0] = 2
    assert (maps.open(name)[0], len(maps.open(name))) == (2, 200)
    assert old[0] == 1


@pytest.mark.parametrize("other", ["psm_1234", "../etc/passwd", "asyncrl-../../etc/passwd"])
def test_only_slots_are_opened(other):
    with pytest.raises(SyncError, match="not the name of a staging slot"):
        SlotMaps().open(other)


def test_a_slot_that_is_gone_is_named(name):
    with pytest.raises(SyncError, match=f"{name} is gone"):
        SlotMaps().open(name)
