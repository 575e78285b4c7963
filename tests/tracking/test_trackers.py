"""One suite for every tracker: `log` returns at once, and after `close` everything that was logged is there, in order."""

from __future__ import annotations

import contextlib
import time

import pytest

from asyncrl.tracking.memory import MemoryTracker
from asyncrl.tracking.mlflow_tracker import MlflowTracker
from asyncrl.tracking.remote import RemoteTracker
from asyncrl.tracking.spool import RunFacts
from asyncrl.transport.rpc import RpcServer
from tests.tracking.stores import FakeStore

FACTS = RunFacts("fake://", "tests", "run", {"training.steps": "3"}, {"version.asyncrl": "0"}, 0)


@contextlib.asynccontextmanager
async def memory(tmp_path):
    tracker = MemoryTracker()
    yield tracker, lambda: [(step, name, value) for _, step, metrics in tracker.records for name, value in metrics.items()]


@contextlib.asynccontextmanager
async def remote(tmp_path):
    taken = []
    server = RpcServer({"track": lambda batch: taken.extend(batch)})
    tracker = RemoteTracker(await server.start(), delay_seconds=0.02)
    yield tracker, lambda: [(step, name, value) for _, step, metrics in taken for name, value in metrics.items()]
    await tracker.close()
    await server.close()


@contextlib.asynccontextmanager
async def mlflow(tmp_path):
    store = FakeStore()
    tracker = MlflowTracker(lambda: FACTS, tmp_path, open_store=store)
    yield tracker, lambda: [(record.step, record.name, record.value) for record in store.records]
    await tracker.close()


@pytest.fixture(params=[memory, remote, mlflow], ids=["memory", "remote", "mlflow"])
def kind(request):
    return request.param


async def test_everything_logged_is_there_after_close_in_order(kind, tmp_path):
    async with kind(tmp_path) as (tracker, delivered):
        for step in range(3000):
            tracker.log("trainer", step, {"loss": step / 2})
        await tracker.close()
        assert delivered() == [(step, "loss", step / 2) for step in range(3000)]


async def test_log_returns_at_once(kind, tmp_path):
    """By its own time, whatever else the machine does."""
    async with kind(tmp_path) as (tracker, _):
        began = time.thread_time()
        for step in range(1000):
            tracker.log("trainer", step, {f"metric/{i}": 1.0 for i in range(20)})
        assert time.thread_time() - began < 1.0
        await tracker.close()


async def test_axes_count_their_own_steps(kind, tmp_path):
    async with kind(tmp_path) as (tracker, delivered):
        tracker.log("trainer", 100, {"reward/mean": 1.0})
        tracker.log("rollouter", 3, {"rollouter/live": 2.0})
        tracker.log("trainer", 101, {"reward/mean": 1.5})
        await tracker.close()
        assert delivered() == [(100, "reward/mean", 1.0), (3, "rollouter/live", 2.0), (101, "reward/mean", 1.5)]


async def test_closing_twice_is_harmless(kind, tmp_path):
    async with kind(tmp_path) as (tracker, _):
        await tracker.close()
        await tracker.close()
