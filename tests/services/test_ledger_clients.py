"""One suite for every `LedgerClient`: the ledger in this process (with and without a file), and the ledger over remote calls."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from asyncrl.errors import DeadlineExceeded, IllegalTransition, LedgerError
from asyncrl.ledger import states
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.ledger.set_back import Held
from asyncrl.ledger.store import FILE_NAME, LedgerWriter, read_samples
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, LiveGroup, PromptCursor, ReturnedGroup, StepRecord
from asyncrl.services.ledger_client import RpcLedgerClient, ledger_handlers
from asyncrl.transport.rpc import RpcClient, RpcServer
from tests.waiting import until

CURSOR = PromptCursor(0, 9, None, 7, False)


def id_of(row, attempt=0):
    return GroupId(0, row, attempt)


@asynccontextmanager
async def over_rpc(local):
    server = RpcServer(ledger_handlers(local, local.samples))
    client = RpcClient(await server.start())
    try:
        yield RpcLedgerClient(client)
    finally:
        await client.close()
        await server.close()


@pytest.fixture(params=["local", "local with a file", "remote"])
async def ledger(request, tmp_path):
    """(client, the ledger behind it, where the test plays the queue)."""
    if request.param == "local":
        local = LocalLedgerClient()
        yield local, local
        return
    local = LocalLedgerClient(LedgerWriter(tmp_path / FILE_NAME))
    if request.param == "remote":
        async with over_rpc(local) as client:
            yield client, local
    else:
        yield local, local
    local.close()
    assert read_samples(tmp_path) == local.samples()


async def queued(client, local, *rows):
    await client.dispatch([Dispatch(id_of(row), 3) for row in rows], CURSOR)
    local.queue([id_of(row) for row in rows])


async def test_live_groups_come_oldest_dispatch_first(ledger):
    client, local = ledger
    await client.dispatch([Dispatch(id_of(5), 1), Dispatch(id_of(2), 2)], CURSOR)
    local.queue([id_of(5)])
    assert await client.live() == [LiveGroup(id_of(5), 1, "queued"), LiveGroup(id_of(2), 2, "in_flight")]
    assert local.attempts.cursor == CURSOR


async def test_a_watch_is_answered_at_once_with_what_happened_since(ledger):
    client, local = ledger
    await queued(client, local, 1, 2)
    await client.end([End(id_of(1), "expired", "stale", reissue=True)])
    events = await client.watch(0, timeout=60)
    assert events.ended == (End(id_of(1), "expired", "stale", reissue=True),)
    assert not events.training_done
    await client.finish_step(StepRecord(1, 0, (End(id_of(2), "trained"),)))
    later = await client.watch(events.seq, timeout=60)
    assert later.ended == (End(id_of(2), "trained"),)
    assert later.finished_steps == 1


async def test_a_waiting_watch_wakes_when_something_happens(ledger):
    client, local = ledger
    await queued(client, local, 1)
    watches = [asyncio.ensure_future(client.watch(0, timeout=60)) for _ in range(2)]
    await until(lambda: local.num_watching == 2)
    await client.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),)))
    for watch in watches:
        assert (await watch).finished_steps == 1


async def test_the_staleness_bound_is_that_of_the_last_step_whoever_asks(ledger):
    client, local = ledger
    await queued(client, local, 1, 2)
    assert (await client.resume_rollouter()).staleness_bound is None
    await client.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),), staleness_bound=3))
    assert (await client.watch(0, timeout=60)).staleness_bound == 3
    await client.finish_step(StepRecord(2, 0, (End(id_of(2), "trained"),), staleness_bound=4))
    assert (await client.watch(0, timeout=60)).staleness_bound == 4
    assert (await client.resume_rollouter()).staleness_bound == 4


async def test_a_watch_returns_with_nothing_when_its_time_has_passed(ledger):
    client, _ = ledger
    events = await client.watch(0, timeout=0.01)
    assert (events.seq, events.ended, events.finished_steps) == (0, (), 0)


async def test_a_dispatch_is_no_event(ledger):
    client, _ = ledger
    await client.dispatch([Dispatch(id_of(1), 0)], CURSOR)
    assert (await client.watch(0, timeout=0.01)).seq == 0


async def test_the_end_of_training_comes_with_the_last_version_and_ends_what_is_live(ledger):
    client, local = ledger
    await queued(client, local, 1)
    await client.finish_training(4)
    events = await client.watch(0, timeout=60)
    assert (events.training_done, events.final_version) == (True, 4)
    assert events.ended == (End(id_of(1), "failed", states.TRAINING_OVER),)
    assert await client.live() == []


async def test_a_group_started_after_the_end_of_training_has_failed(ledger):
    client, _ = ledger
    await client.finish_training(0)
    seen = (await client.watch(0, timeout=60)).seq
    await client.dispatch([Dispatch(id_of(1), 0)], CURSOR)
    assert (await client.watch(seen, timeout=60)).ended == (End(id_of(1), "failed", states.TRAINING_OVER),)


async def test_what_is_illegal_is_refused_by_its_kind_and_changes_nothing(ledger):
    client, local = ledger
    await queued(client, local, 1)
    with pytest.raises(IllegalTransition, match="0/1/0 was dispatched before"):
        await client.dispatch([Dispatch(id_of(1), 0)], CURSOR)
    with pytest.raises(IllegalTransition, match="0 steps are finished"):
        await client.finish_step(StepRecord(2, 0, (End(id_of(1), "trained"),)))
    assert local.attempts.counts()["queued"] == 1


async def test_a_reason_may_be_any_text(ledger):
    client, local = ledger
    await queued(client, local, 1)
    await client.end([End(id_of(1), "failed", "odd \ud800 text\0 " + "x" * 10_000)])
    (end,) = (await client.watch(0, timeout=60)).ended
    assert end.reason.startswith("odd ? text� xxx")
    assert len(end.reason) == states.REASON_CHARACTERS


async def test_a_late_comer_is_told_that_old_events_are_gone(ledger, monkeypatch):
    client, local = ledger
    monkeypatch.setattr(states, "EVENTS_KEPT", 1)
    await queued(client, local, 1, 2)
    await client.end([End(id_of(1), "failed"), End(id_of(2), "failed")])
    with pytest.raises(LedgerError, match="begin with live"):
        await client.watch(0, timeout=60)


async def test_an_end_reaches_its_listener_before_any_watcher(ledger):
    client, local = ledger
    seen = []
    local.on_end = lambda ids, step: seen.append((list(ids), step, local.num_watching))
    await queued(client, local, 1)
    await client.end([End(id_of(1), "failed")])
    await client.watch(0, timeout=60)
    assert seen == [([id_of(1)], 1, 0)]


async def test_a_finished_step_is_in_the_file_when_the_call_returns(tmp_path):
    local = LocalLedgerClient(LedgerWriter(tmp_path / FILE_NAME))
    async with over_rpc(local) as client:
        await queued(client, local, 1)
        await client.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),)))
        assert read_samples(tmp_path)["trained"] == 1
    local.close()


async def test_nobody_is_told_before_the_file_is(tmp_path):
    """Callers return, and watchers wake, when the change can be read; all of one turn of the loop are one transaction."""
    writer = LedgerWriter(tmp_path / FILE_NAME)
    local = LocalLedgerClient(writer)
    local.take_back([], "nothing")
    await local.dispatch([Dispatch(id_of(row), 0) for row in range(4)], CURSOR)
    assert read_samples(tmp_path)["dispatched"] == 4
    flushes = []
    flush = writer.flush
    writer.flush = lambda: (flushes.append(writer.dirty), flush())
    watch = asyncio.ensure_future(local.watch(0, timeout=60))
    ends = [asyncio.ensure_future(local.end([End(id_of(row), "failed", "lost")])) for row in range(4)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (watch, *ends))
    assert read_samples(tmp_path)["failed"] == 0
    late = asyncio.ensure_future(local.watch(0, timeout=60))  # it would have its events at once
    await asyncio.gather(*ends, late)
    assert (await watch).seq == late.result().seq == read_samples(tmp_path)["failed"] == 4
    assert flushes == [True]
    local.close()


async def test_what_is_said_again_is_no_error_and_changes_nothing(ledger):
    client, local = ledger
    for _ in range(2):
        await client.dispatch([Dispatch(id_of(row), 3) for row in (1, 2)], CURSOR)
    local.queue([id_of(1), id_of(2)])
    for _ in range(2):
        await client.end([End(id_of(1), "expired", "stale", reissue=True)])
    for _ in range(2):
        await client.finish_step(StepRecord(1, 0, (End(id_of(2), "trained"),)))
        await client.sync()
        await client.checkpointed(1)
    for _ in range(2):
        await client.finish_training(1)
    assert (await client.watch(0, timeout=60)).seq == 4


async def test_a_rollouter_that_starts_learns_where_everything_stands(ledger):
    client, local = ledger
    await client.dispatch([Dispatch(id_of(row), 3) for row in range(5)], CURSOR)
    local.queue([id_of(1)])
    await client.end([End(id_of(0), "failed", "lost", reissue=True)])
    members = {id_of(2): {0, 1}, id_of(3): {1}}
    local.held = lambda: Held(2, scored=[id_of(1)], members=members)
    resumption = await client.resume_rollouter()
    assert resumption.live == (LiveGroup(id_of(1), 3, "queued"), LiveGroup(id_of(2), 3, "in_flight"))
    assert resumption.returned == (ReturnedGroup(id_of(3), (0,)), ReturnedGroup(id_of(4), (0, 1)))
    assert (resumption.owed, resumption.cursor, resumption.seq) == ((id_of(0, 1),), CURSOR, 1)
    assert (resumption.finished_steps, resumption.final_version, resumption.failures_by_row) == (0, None, {0: 1})
    assert await client.live() == list(resumption.live)
    await client.restart([Dispatch(id_of(3), 5), Dispatch(id_of(4), 5)])
    assert [(group.id.row, group.start_version) for group in await client.live()] == [(1, 3), (2, 3), (3, 5), (4, 5)]


async def test_a_checkpoint_of_a_step_that_is_not_finished_is_refused(ledger):
    client, _ = ledger
    with pytest.raises(LedgerError, match="0 steps are finished"):
        await client.checkpointed(1)


async def test_a_call_survives_the_ledgers_process(tmp_path):
    """No answer comes from the first; the second, at the same address, is asked again."""
    local = LocalLedgerClient(LedgerWriter(tmp_path / FILE_NAME))
    asked = asyncio.Event()

    async def silent(**params):
        asked.set()
        await asyncio.sleep(3600)

    first = RpcServer({"ledger.dispatch": silent})
    address = await first.start()
    client = RpcClient(address)
    ledger = RpcLedgerClient(client, deadline=60, try_seconds=0.2)
    call = asyncio.ensure_future(ledger.dispatch([Dispatch(id_of(1), 0)], CURSOR))
    await asyncio.wait_for(asked.wait(), 10)
    await first.close()
    second = RpcServer(ledger_handlers(local, local.samples), bind=address)
    await second.start()
    await asyncio.wait_for(call, 30)
    assert read_samples(tmp_path)["dispatched"] == 1
    await client.close()
    await second.close()
    local.close()


async def test_a_file_that_refuses_stops_the_ledger_and_everybody_learns_of_it(tmp_path, monkeypatch):
    writer = LedgerWriter(tmp_path / FILE_NAME)
    local = LocalLedgerClient(writer)

    def refuse():
        raise LedgerError("the disk is full")

    async with over_rpc(local) as client:
        watch = asyncio.ensure_future(client.watch(0, timeout=60))
        await until(lambda: local.num_watching == 1)
        monkeypatch.setattr(writer, "flush", refuse)
        with pytest.raises(LedgerError, match="the disk is full"):
            await client.dispatch([Dispatch(id_of(1), 0)], CURSOR)
        with pytest.raises(LedgerError, match="the disk is full"):
            async with asyncio.timeout(10):
                await local.until_failed()
        with pytest.raises(LedgerError, match="nothing is recorded any more: the disk is full"):
            await watch
        with pytest.raises(LedgerError, match="nothing is recorded any more"):
            await client.dispatch([Dispatch(id_of(2), 0)], CURSOR)
    local.close()
    monkeypatch.undo()
    writer.close()


async def test_a_ledger_that_does_not_answer_is_said_to_be_silent():
    client = RpcClient("tcp://127.0.0.1:1")
    with pytest.raises(DeadlineExceeded):
        await RpcLedgerClient(client, deadline=0.05).live()
    await client.close()
