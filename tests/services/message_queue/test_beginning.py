"""What a new queue's process makes of what the one before left: one sentence a test."""

from __future__ import annotations

import errno
import os

import pytest

from asyncrl.errors import LedgerError, StorageFailed, UserError
from asyncrl.ledger.audit import audit
from asyncrl.ledger.record import QueueHead
from asyncrl.protocols import End
from asyncrl.services.message_queue import Fresh, Restarted, SetBack
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED
from asyncrl.transport.journal import segments
from tests.services.message_queue.world import Crash, QueueWorld, config_of, id_of


@pytest.fixture
async def make(tmp_path):
    """Make a world and boot it; it is closed at the end."""
    worlds = []

    def of(durability="process", checkpoint_every=0, **queue):
        worlds.append(QueueWorld(tmp_path, config_of(durability, checkpoint_every, **queue)))
        worlds[-1].boot()
        return worlds[-1]

    yield of
    for world in worlds:
        world.crash()


def reboot(world, recovery):
    world.crash()
    world.boot(recovery)


def text(*rows):
    return [str(id_of(row)) for row in rows]


def members(row, *numbers):
    return [str(id_of(row).member(number)) for number in numbers]


def spoil(world, message_id, how="flip"):
    """Harm the record of this message on the disk."""
    place = next(entry.place for entry in world.record().journal if entry.message_id == message_id)
    path = world.run_dir / "journal" / f"{place.segment:08d}.segment"
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[place.offset + 12 + place.size // 2] ^= 1
    elif how == "cut":
        del content[place.offset + 12 + place.size // 2 :]
    else:
        path.unlink()
        return
    path.write_bytes(content)


async def test_what_was_accepted_is_offered_again_taken_messages_first(make):
    world = make()
    await world.dispatch(3)
    world.send(ROLLOUTS, members(0, 0, 1) + members(1, 0))
    assert len(world.take(ROLLOUTS, 2)) == 2
    world.send(SCORED, text(2))  # the next transaction holds what was taken before
    reboot(world, Restarted())
    assert world.take(ROLLOUTS) == [(members(0, 0)[0], True), (members(0, 1)[0], True), (members(1, 0)[0], False)]
    assert world.take(SCORED) == [(*text(2), False)]


async def test_what_was_taken_is_outside_the_bound_and_the_rest_within_after_a_restart(make):
    world = make()
    await world.dispatch(3)
    world.send(SCORED, text(0, 1), size=500)
    world.take(SCORED, 1)
    world.send(SCORED, text(2), size=300)
    reboot(world, Restarted())
    assert world.exchange.topic(SCORED).committed == (2, 800)


async def test_a_message_is_a_duplicate_also_for_the_next_process(make):
    world = make()
    await world.dispatch(1)
    world.send(ROLLOUTS, members(0, 0))
    reboot(world, Restarted())
    assert world.send(ROLLOUTS, members(0, 0, 1)) == members(0, 1)
    world.send(SCORED, text(0))
    reboot(world, Restarted())
    assert world.send(SCORED, text(0)) == []
    world.send(ROLLOUTS, members(0, 0))
    assert world.unsettled(ROLLOUTS) == []


async def test_payloads_that_were_taken_are_in_the_journal_alone(make):
    world = make()
    await world.dispatch(1)
    world.send(ROLLOUTS, members(0, 0, 1))
    world.take(ROLLOUTS, 1)
    assert [stored.payload is None for stored in world.exchange.topic(ROLLOUTS).unsettled()] == [True, False]
    world.exchange.topic(ROLLOUTS).close_consumer(b"consumer")
    assert [redelivered for _, redelivered in world.take(ROLLOUTS)] == [True, False]


async def test_a_fresh_run_is_refused_where_another_left_its_ledger(make):
    world = make()
    await world.dispatch(1)
    world.crash()
    with pytest.raises(LedgerError, match="is the ledger of an earlier run: resume it"):
        world.boot(Fresh())


async def test_a_checkpoint_settles_what_ended_up_to_its_step_and_nothing_else(make):
    world = make(checkpoint_every=1)
    await world.dispatch(3)
    world.send(SCORED, text(0, 1, 2))
    await world.finish_step([id_of(0)])
    await world.ledger.end([End(id_of(1), "expired", "stale")])  # after step 1: the checkpoint of step 2 holds it
    await world.ledger.checkpointed(1)
    await world.finish_step([id_of(2)])
    assert [entry.message_id for entry in world.record().journal] == text(1, 2)
    reboot(world, SetBack(1, 1))
    world.cut_batches(1)
    assert world.take(SCORED) == [(text(1)[0], False), (text(2)[0], False)]
    assert world.attempts.counts() == {
        "dispatched": 3, "trained": 1, "filtered": 0, "failed": 0, "expired": 0, "in_flight": 0, "queued": 2,
    }  # fmt: skip


async def test_what_a_checkpoint_waits_for_outlives_the_queues_process(make):
    world = make(checkpoint_every=1)
    await world.dispatch(2)
    world.send(SCORED, text(0, 1))
    await world.finish_step([id_of(0)])
    reboot(world, Restarted())
    await world.finish_step([id_of(1)])
    reboot(world, Restarted())
    assert world.take(SCORED) == []
    await world.ledger.checkpointed(1)
    assert [entry.message_id for entry in world.record().journal] == text(1)
    assert audit(world.run_dir).ok


async def test_without_checkpoints_a_group_is_settled_at_its_end(make):
    world = make(checkpoint_every=0)
    await world.dispatch(1)
    world.send(SCORED, text(0))
    await world.finish_step([id_of(0)])
    assert world.record().journal == []
    assert world.record().heads == [QueueHead("process", False)]


async def test_back_to_an_older_checkpoint_what_the_journal_gave_away_is_generated_again(make):
    world = make(checkpoint_every=1)
    await world.dispatch(2)
    world.send(SCORED, text(0, 1))
    await world.finish_step([id_of(0)])
    await world.finish_step([id_of(1)])
    await world.ledger.checkpointed(1)
    reboot(world, SetBack(0, 1))
    assert world.attempts.returned() == [id_of(0)]
    assert world.take(SCORED) == [(text(1)[0], False)]


async def test_setting_back_twice_as_the_same_start_happens_once(make):
    world = make(checkpoint_every=1)
    await world.dispatch(1)
    world.send(SCORED, text(0))
    await world.finish_step([id_of(0)])
    reboot(world, SetBack(0, 1))
    assert world.attempts.finished_steps == 0
    await world.finish_step([id_of(0)])
    reboot(world, SetBack(0, 1))
    assert world.attempts.finished_steps == 1


async def test_a_group_in_flight_with_a_member_missing_is_generated_again_and_says_which(make):
    world = make()
    await world.dispatch(3)
    world.send(ROLLOUTS, members(0, 0, 1) + members(1, 1))
    reboot(world, SetBack(0, 1))
    resumption = await world.ledger.resume_rollouter()
    assert [group.id for group in resumption.live] == [id_of(0)]
    assert [(group.id, group.missing) for group in resumption.returned] == [(id_of(1), (0,)), (id_of(2), (0, 1))]


async def test_with_durability_none_what_the_trainer_holds_stays_queued_and_all_else_is_generated_again(make):
    world = make("none")
    await world.dispatch(4)
    world.send(SCORED, text(0, 1))
    world.send(ROLLOUTS, members(2, 0))
    reboot(world, Restarted(frozenset({id_of(0), id_of(9)})))
    assert world.attempts.returned() == [id_of(1), id_of(2), id_of(3)]
    assert world.beginning.queue.queued() == text(0)
    await world.finish_step([id_of(0)])
    assert world.beginning.queue.queued() == []
    assert (await world.ledger.resume_rollouter()).returned[0].missing == (0, 1)


async def test_with_durability_none_a_set_back_forgets_the_queue_and_the_cursor(make):
    world = make("none", checkpoint_every=1)
    await world.dispatch(2)
    world.send(SCORED, text(0))
    await world.finish_step([id_of(0)])
    await world.dispatch(2)
    reboot(world, SetBack(1, 1))
    assert world.attempts.returned() == [id_of(1)]
    assert world.attempts.cursor.position == 2
    assert world.unsettled(SCORED) == []


async def test_a_run_that_was_durable_and_is_no_more_leaves_no_journal(make):
    world = make()
    await world.dispatch(1)
    world.send(SCORED, text(0), size=10_000)
    world.crash()
    world.config = config_of("none")
    world.boot(SetBack(0, 1))
    assert world.record().journal == []
    assert not list((world.run_dir / "journal").iterdir())


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
async def test_a_wrong_record_is_named_and_its_prompt_starts_again(make, how):
    world = make()
    await world.dispatch(2)
    world.send(SCORED, text(0))
    world.send(ROLLOUTS, members(1, 0))
    world.crash()
    spoil(world, members(1, 0)[0], how)
    if how != "gone":
        spoil(world, text(0)[0], how)
    world.boot(Restarted())
    assert world.beginning.num_lost == 2
    assert world.attempts.owed() == [id_of(0, 1), id_of(1, 1)]
    assert world.attempts.reasons == {"failed: lost from the queue's journal": 2}
    assert audit(world.run_dir).ok


async def test_a_wrong_record_of_a_group_in_the_trainers_hands_is_no_loss(make):
    world = make()
    await world.dispatch(2)
    world.send(SCORED, text(0))
    world.take(SCORED)
    world.send(SCORED, text(1))
    world.crash()
    spoil(world, text(0)[0])
    world.boot(Restarted())
    assert world.beginning.queue.queued() == text(1, 0)
    await world.finish_step([id_of(0)])
    assert world.attempts.counts()["trained"] == 1


async def test_after_a_set_back_a_wrong_record_is_generated_again_as_the_same_attempt(make):
    world = make(checkpoint_every=1)
    await world.dispatch(1)
    world.send(SCORED, text(0))
    world.crash()
    spoil(world, text(0)[0])
    world.boot(SetBack(0, 1))
    assert world.attempts.returned() == [id_of(0)]
    assert world.attempts.owed() == []


async def test_a_record_that_rots_while_the_queue_runs_is_named_when_it_is_taken(make):
    world = make()
    await world.dispatch(1)
    world.send(SCORED, text(0))
    world.take(SCORED)
    spoil(world, text(0)[0])
    world.exchange.topic(SCORED).close_consumer(b"consumer")
    assert world.take(SCORED) == []
    assert world.attempts.owed() == [id_of(0, 1)]


async def test_files_outlive_their_rows_never_the_other_way_round(make, monkeypatch):
    """The process dies between the writing of payloads and the transaction that settles what lay in an older file."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 500)
    world = make()
    await world.dispatch(4)
    for row in range(3):
        world.send(SCORED, text(row), size=600)

    def die():
        raise Crash

    world.exchange.settle(SCORED, text(0))
    world.accept(SCORED, text(3), size=600)
    world.exchange.hooks.commit = die
    with pytest.raises(Crash):
        world.exchange.publish()
    reboot(world, Restarted())
    assert world.beginning.num_lost == 0
    assert [each for each, _ in world.take(SCORED)] == text(0, 1, 2)


async def test_a_few_that_linger_do_not_keep_the_disk(make, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 10_000)
    world = make()
    ids = await world.dispatch(400)
    for start in range(0, 400, 4):
        world.send(SCORED, [str(id) for id in ids[start : start + 4]], size=1000)
        world.exchange.settle(SCORED, [str(id) for id in ids[start + 1 : start + 4] if start % 40 or id.row % 4 == 1])
    world.send(SCORED, [])
    live = sum(entry.place.size for entry in world.record().journal)
    assert world.journal.segments.num_bytes() < 4 * live + 4 * 10_000
    kept = world.unsettled(SCORED)
    reboot(world, Restarted())
    assert world.unsettled(SCORED) == kept
    assert [each for each, _ in world.take(SCORED)] == kept


@pytest.mark.parametrize("partly", [False, True])
async def test_a_full_disk_is_named_and_the_sender_hears_of_no_acceptance(make, monkeypatch, partly):
    world = make()
    await world.dispatch(2)
    world.send(ROLLOUTS, members(0, 0))
    real = os.writev

    def full(descriptor, buffers):
        if partly:
            return real(descriptor, [b"".join(buffers)[:20]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fuller(descriptor, rest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segments.os, "writev", full)
    monkeypatch.setattr(segments.os, "write", fuller)
    world.accept(ROLLOUTS, members(1, 0))
    with pytest.raises(StorageFailed, match=r"journal in .* cannot be written: No space left on device: free space.*state_dir"):
        world.exchange.publish()
    monkeypatch.undo()
    reboot(world, Restarted())
    assert world.unsettled(ROLLOUTS) == members(0, 0)
    assert world.beginning.num_lost == 0


async def test_a_folder_without_access_is_named(make, tmp_path):
    world = make()
    world.crash()
    (tmp_path / "journal").rmdir()
    (tmp_path / "journal").write_text("")
    with pytest.raises(StorageFailed, match="File exists"):
        world.boot(Restarted())
    world.config = world.config.model_copy(
        update={"cluster": world.config.cluster.model_copy(update={"state_dir": str(tmp_path / "journal")})}
    )
    with pytest.raises(UserError, match=r"set cluster\.state_dir to what it was"):
        world.boot(Restarted())


@pytest.mark.parametrize("durability", ["process", "none"])
async def test_an_ended_stream_has_ended_for_the_next_process_unless_its_producer_starts_anew(make, durability):
    world = make(durability)
    world.exchange.close_sender(ROLLOUTS, b"rollouter", 0.0)
    world.exchange.publish()
    world.crash()
    world.boot_bare(Restarted())
    assert world.exchange.topic(ROLLOUTS).ended == (durability == "process")
    world.crash()
    world.boot_bare(SetBack(0, 1))
    assert not world.exchange.topic(ROLLOUTS).ended
