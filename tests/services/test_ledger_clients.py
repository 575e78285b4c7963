"""One suite for every `LedgerClient`: the ledger in this process (with and without a file), and the ledger over remote calls."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from asyncrl.errors import DeadlineExceeded, IllegalTransition, LedgerError
from asyncrl.ledger import states
from asyncrl.ledger.local import LocalLedgerClient
from asyncrl.ledger.store import FILE_NAME, LedgerWriter, read_samples
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, LiveGroup, PromptCursor, StepRecord
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
    local.on_end = lambda ids: seen.append((list(ids), local.num_watching))
    await queued(client, local, 1)
    await client.end([End(id_of(1), "failed")])
    await client.watch(0, timeout=60)
    assert seen == [([id_of(1)], 0)]


async def test_a_finished_step_is_in_the_file_when_the_call_returns(tmp_path):
    local = LocalLedgerClient(LedgerWriter(tmp_path / FILE_NAME))
    async with over_rpc(local) as client:
        await queued(client, local, 1)
        await client.finish_step(StepRecord(1, 0, (End(id_of(1), "trained"),)))
        assert read_samples(tmp_path)["trained"] == 1
    local.close()


async def test_other_changes_are_in_the_file_a_moment_later(tmp_path):
    local = LocalLedgerClient(LedgerWriter(tmp_path / FILE_NAME))
    await local.dispatch([Dispatch(id_of(1), 0)], CURSOR)
    assert read_samples(tmp_path)["dispatched"] == 0
    await until(lambda: read_samples(tmp_path)["dispatched"] == 1)
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
