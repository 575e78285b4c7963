"""A service's tracker loses nothing while the supervisor lives."""

from __future__ import annotations

import asyncio

import numpy as np

from asyncrl.errors import DeadlineExceeded
from asyncrl.tracking import remote
from asyncrl.tracking.remote import RemoteTracker


class Supervisor:
    """Takes batches; refuses the first `refusals` calls."""

    def __init__(self, refusals=0):
        self.batches, self.refusals, self.closed = [], refusals, False

    def __call__(self, address):
        return self

    async def call(self, method, *, timeout, batch):
        if self.refusals:
            self.refusals -= 1
            raise DeadlineExceeded("silence")
        self.batches.append(batch)

    async def close(self):
        self.closed = True


async def test_records_of_a_moment_travel_together():
    supervisor = Supervisor()
    tracker = RemoteTracker("", delay_seconds=0.02, connect=supervisor)
    for step in range(10):
        tracker.log("trainer", step, {"loss": np.float32(0.5)})
    await asyncio.sleep(0.1)
    assert [len(batch) for batch in supervisor.batches] == [10]
    assert supervisor.batches[0][3] == ["trainer", 3, {"loss": 0.5}]
    await tracker.close()
    assert supervisor.closed


async def test_a_call_that_failed_is_made_again():
    supervisor = Supervisor(refusals=3)
    tracker = RemoteTracker("", delay_seconds=0.01, connect=supervisor)
    tracker.log("trainer", 1, {"loss": 0.5})
    await tracker.close()
    assert supervisor.batches == [[["trainer", 1, {"loss": 0.5}]]]


async def test_close_is_bounded_when_nobody_answers(monkeypatch, caplog):
    monkeypatch.setattr(remote, "CLOSE_SECONDS", 0.05)
    tracker = RemoteTracker("", delay_seconds=0.01, connect=Supervisor(refusals=10**9))
    tracker.log("trainer", 1, {"loss": 0.5})
    async with asyncio.timeout(5):
        await tracker.close()
    assert "did not take the last 1 records" in caplog.text


async def test_what_comes_after_close_is_dropped_with_a_word(caplog):
    supervisor = Supervisor()
    tracker = RemoteTracker("", connect=supervisor)
    await tracker.close()
    tracker.log("trainer", 1, {"loss": 0.5})
    assert "after the tracker was closed" in caplog.text
    assert supervisor.batches == []
