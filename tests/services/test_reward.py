"""Front and workers together: trajectories in, scored groups out, whatever the functions and the workers do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from asyncrl.clock import SystemClock
from asyncrl.errors import IllegalTransition, RemoteError, RunError, StreamClosed
from asyncrl.messages import ScoredGroup
from asyncrl.protocols import Delivery
from asyncrl.rewards import FunctionSpec
from asyncrl.rewards.executor import FunctionExecutor
from asyncrl.services.kept_figures import KeptFigures
from asyncrl.services.reward import FrontParts, RewardFront, RewardWorker
from asyncrl.tracking.memory import MemoryTracker
from asyncrl.transport.rpc import RpcClient
from tests.messages.samples import trajectory
from tests.waiting import until

FILE = Path(__file__).parents[1] / "rewards" / "user_functions.py"
SYNC, ASYNC = f"{FILE}:by_text", f"{FILE}:by_text_async"


class Rollouts:
    """A receiver that the test feeds."""

    def __init__(self):
        self._arrived = asyncio.Queue()

    def feed(self, *trajectories):
        self._arrived.put_nowait([Delivery(t) for t in trajectories])

    def end(self):
        self._arrived.put_nowait(None)

    async def receive(self, *, max_items, timeout):
        try:
            async with asyncio.timeout(timeout):
                deliveries = await self._arrived.get()
        except TimeoutError:
            return []
        if deliveries is None:
            raise StreamClosed("the end of the data")
        return deliveries

    async def settle(self, ids): ...

    async def close(self): ...


class Scored:
    """A sender that keeps what it is given; `room` holds it back."""

    def __init__(self):
        self.groups, self.closed, self.room = [], asyncio.Event(), asyncio.Event()
        self.room.set()

    async def send(self, messages):
        await self.room.wait()
        self.groups += messages

    async def close(self):
        self.closed.set()


class Ends:
    """The one method of a ledger that the front uses."""

    def __init__(self):
        self.ends = []

    async def end(self, ends):
        self.ends += ends


class Bench:
    """A front with workers, over real sockets."""

    def __init__(self, functions, *, limit_seconds=0.5, min_scored=2, max_failed_groups=0, kept=None):
        self.max_failed_groups = max_failed_groups
        self.rollouts, self.scored, self.ledger, self.tracker = Rollouts(), Scored(), Ends(), MemoryTracker()
        self.kept = []
        self.parts = FrontParts(self.rollouts, self.scored, self.ledger, self.tracker, self.kept.append, kept or KeptFigures())
        self.functions, self.limit, self.min_scored = functions, limit_seconds, min_scored
        self.front = self.make_front()
        self.tasks, self.workers = [], []

    def make_front(self):
        return RewardFront(
            lambda book: self.parts,
            min_scored=self.min_scored,
            limit_seconds=self.limit,
            num_functions=len(self.functions),
            max_failed_groups=self.max_failed_groups,
            clock=SystemClock(),
        )

    async def begin(self, num_workers=1):
        self.book = {"reward": await self.front.start()}
        self.tasks.append(asyncio.create_task(self.front.run(self.book)))
        for index in range(num_workers):
            await self.add_worker(index)
        self.client = RpcClient(self.book["reward"]["rpc"])
        return self

    def worker(self, index, executor=None):
        specs = [FunctionSpec.of(f"f{i}", function) for i, function in enumerate(self.functions)]
        executor = executor or FunctionExecutor(specs, [1.0] * len(specs), limit_seconds=self.limit, concurrency=8)
        return RewardWorker(index, executor, concurrency=8, clock=SystemClock())

    async def add_worker(self, index, executor=None):
        worker = self.worker(index, executor)
        await worker.start()
        self.follow(worker)
        return worker

    def follow(self, worker):
        self.workers.append(worker)
        self.tasks.append(asyncio.create_task(worker.run(self.book)))

    async def end(self):
        await self.client.close()
        for service in (self.front, *self.workers):
            await service.stop()
        await asyncio.wait_for(asyncio.gather(*self.tasks), 20)


@contextlib.asynccontextmanager
async def bench(*functions, num_workers=1, **options):
    bench = await Bench(functions, **options).begin(num_workers)
    try:
        yield bench
    finally:
        await bench.end()


def group(row, *responses, ground_truth="yes"):
    size = len(responses)
    whole = [trajectory(row, member, num_tokens=2, group_size=size) for member in range(size)]
    return [dataclasses.replace(t, response=r, ground_truth=ground_truth) for t, r in zip(whole, responses, strict=True)]


async def test_groups_are_scored_and_sent_in_spite_of_interleaving():
    async with bench("exact_match") as b:
        groups = [group(row, "yes", "no", "yes") for row in range(4)]
        for members in zip(*groups, strict=True):
            b.rollouts.feed(*members)
        b.rollouts.end()
        await asyncio.wait_for(b.scored.closed.wait(), 20)
        assert sorted(g.id.row for g in b.scored.groups) == [0, 1, 2, 3]
        assert all(g.rewards.tolist() == [1.0, 0.0, 1.0] for g in b.scored.groups)
        assert b.front.status()["state"] == "drained"
        assert await b.client.call("in_flight", timeout=5.0) == []
    summary = b.front.summary()
    assert summary["scoring"]["components"] == pytest.approx({"reward": 2 / 3, "f0": 2 / 3})
    assert 0.0 <= summary["idle"]["reward"] <= 1.0
    assert b.tracker.names("scoring") >= {"scoring/reward", "scoring/f0", "idle/reward"}


@pytest.mark.parametrize("function", [SYNC, ASYNC], ids=["sync", "async"])
async def test_bad_samples_are_failures_with_reasons_and_the_worker_lives_on(function):
    async with bench(function) as b:
        b.rollouts.feed(*group(0, "ok:1", "raise:boom", "none", "nan", "dict", "sleep", "ok:2"))
        await until(lambda: len(b.scored.groups) == 1)
        b.rollouts.feed(*group(1, "ok:1", "ok:2"))
        await until(lambda: len(b.scored.groups) == 2)
        first, second = b.scored.groups
        assert first.failures == [
            None,
            "f0: raised ValueError: boom",
            "f0: returned None, not a number",
            "f0: returned nan, not a finite number",
            None,
            "f0: timeout after 0.5 s",
            None,
        ]
        np.testing.assert_array_equal(first.rewards, np.array([1, np.nan, np.nan, np.nan, 0.5, np.nan, 2], np.float32))
        assert first.metrics == {"f0/length": 7.0}
        assert second.rewards.tolist() == [1.0, 2.0]
        assert b.front.summary()["trajectories"] == {"failed": 4}
        assert b.front.summary()["scoring"]["reasons"]["f0: timeout after 0.5 s"] == 1


async def test_a_group_with_too_few_scores_ends_in_the_ledger():
    async with bench(SYNC) as b:
        b.rollouts.feed(*group(0, "none", "none", "raise:x", "ok:1"))
        await until(lambda: b.ledger.ends)
        (end,) = b.ledger.ends
        assert (end.state, end.reason) == ("failed", "too few scored: 1 of 4, f0: returned None, not a number")
        assert [failed.id for failed in b.kept] == [end.id]
        assert await b.client.call("in_flight", timeout=5.0) == []
        assert b.scored.groups == []


async def test_a_reward_that_scores_nothing_ends_the_run_and_one_score_is_enough_to_go_on():
    b = await Bench([SYNC], max_failed_groups=3).begin()
    run = b.tasks[0]
    for number in range(2):
        b.rollouts.feed(*group(number, "none", "none"))
    b.rollouts.feed(*group(2, "ok:1", "ok:2"))
    for number in range(3, 5):
        b.rollouts.feed(*group(number, "none", "none"))
    await until(lambda: len(b.ledger.ends) == 4)
    assert not run.done()
    b.rollouts.feed(*group(5, "none", "none"))
    with pytest.raises(RunError, match=r"3 groups in a row failed, .*reward.max_failed_groups.* the last, 0/5/0"):
        await asyncio.wait_for(run, 20)
    b.tasks.remove(run)
    await b.end()


async def test_copies_are_dropped():
    async with bench("exact_match") as b:
        members = group(0, "yes", "no")
        b.rollouts.feed(*members, members[0])
        await until(lambda: b.scored.groups)
        b.rollouts.feed(*members)
        b.rollouts.end()
        await asyncio.wait_for(b.scored.closed.wait(), 20)
        assert len(b.scored.groups) == 1
        assert b.front.summary()["scoring"]["duplicates"] == 3


async def test_a_full_scored_topic_does_not_stop_the_front_from_taking_and_scoring():
    async with bench("exact_match") as b:
        b.scored.room.clear()
        for row in range(50):
            b.rollouts.feed(*group(row, "yes", "no"))
        await until(lambda: b.front.summary()["scoring"]["scored"] == 100)
        assert len(await b.client.call("in_flight", timeout=5.0)) == 50
        b.scored.room.set()
        await until(lambda: len(b.scored.groups) == 50)
        assert [g.id.row for g in b.scored.groups] == list(range(50))
        await until(lambda: b.front.in_flight() == [])


async def test_evaluation_is_scored_in_order_also_after_the_end_of_the_data():
    async with bench("exact_match", SYNC) as b:
        b.rollouts.end()
        await asyncio.wait_for(b.scored.closed.wait(), 20)
        items = [{"prompt": "p", "response": r, "ground_truth": "ok:1", "extra_info": {}} for r in ("ok:1", "none", "ok:5")]
        scores = await b.client.call("score", timeout=20.0, items=items)
        assert scores == [
            {"score": 2.0, "failure": None},
            {"score": None, "failure": "f1: returned None, not a number"},
            {"score": 5.0, "failure": None},
        ]


class Hanging:
    """An executor that never answers, for a worker to be lost with its samples."""

    fields, is_serial = ("response",), True

    async def start(self): ...

    async def run(self, items):
        await asyncio.Event().wait()

    async def close(self): ...

    def counts(self):
        return {}


async def test_samples_of_a_worker_that_is_restarted_are_scored_by_the_next():
    async with bench("exact_match", num_workers=0) as b:
        lost = await b.add_worker(0, Hanging())
        b.rollouts.feed(*group(0, "yes", "no"))
        await until(lambda: b.front.status()["being_scored"] == 2)
        await lost.stop()
        await b.add_worker(0)
        await until(lambda: b.scored.groups)
        assert b.scored.groups[0].rewards.tolist() == [1.0, 0.0]


async def test_a_sample_that_workers_died_with_failed_and_its_neighbour_did_not():
    async with bench("exact_match", num_workers=0) as b:
        lost = await b.add_worker(0, Hanging())
        b.rollouts.feed(*group(0, "yes", "no"))
        await until(lambda: b.front.status()["being_scored"] == 2)
        await lost.stop()
        lost = await b.add_worker(0, Hanging())
        await until(lambda: b.front.status()["being_scored"] == 1)
        await lost.stop()
        await b.add_worker(0)
        await until(lambda: b.ledger.ends)
        assert b.ledger.ends[0].reason == "too few scored: 1 of 2, its worker died 2 times while scoring it"


async def test_a_worker_that_is_back_at_its_address_is_noticed_at_once_and_does_not_do_what_the_one_before_was_asked():
    async with bench("exact_match", num_workers=0) as b:
        lost = await b.add_worker(0, Hanging())
        b.rollouts.feed(*group(0, "yes", "no"))
        await until(lambda: b.front.status()["being_scored"] == 2)
        await lost.stop()
        await until(lambda: lost.status()["state"] == "done")
        back = b.worker(0)
        began = asyncio.get_running_loop().time()
        await back.start({"rpc": lost._address})
        b.follow(back)
        await until(lambda: b.scored.groups)
        assert asyncio.get_running_loop().time() - began < 5.0
        assert back.status()["samples"] == 2
        client = RpcClient(lost._address)
        with pytest.raises(RemoteError, match="was started again"):
            await client.call("score", timeout=5.0, items=[{"response": "yes"}], incarnation="another")
        await client.close()


class OneSided:
    """A ledger in which a front before this one has said another end of the group."""

    def __init__(self):
        self.calls = []

    async def end(self, ends):
        self.calls.append([str(end.id) for end in ends])
        if any(end.id.row == 0 for end in ends):
            raise IllegalTransition("group 0/0/0 cannot become failed: it is ended")


async def test_a_group_that_has_another_end_keeps_it_and_the_front_goes_on():
    async with bench(SYNC) as b:
        b.ledger = OneSided()
        object.__setattr__(b.parts, "ledger", b.ledger)
        groups = [group(0, "none", "none"), group(1, "none", "none")]
        b.rollouts.feed(*groups[0], *groups[1])
        await until(lambda: b.front.in_flight() == [] and b.ledger.calls)
        assert b.ledger.calls[-1] == [str(groups[1][0].id.group)]


async def test_a_front_that_takes_a_lost_ones_place_scores_what_the_queue_gives_it_again():
    async with bench("exact_match") as b:
        whole, half = group(0, "yes", "no"), group(1, "yes", "no")
        b.rollouts.feed(*whole, half[0])
        await until(lambda: b.scored.groups)
        address = b.book["reward"]["rpc"]
        b.tasks[0].cancel()
        await asyncio.gather(b.tasks[0], return_exceptions=True)
        b.rollouts.feed(half[0])  # the queue gives it again; what was scored it does not
        b.front = b.make_front()
        await b.front.start({"rpc": address})
        b.tasks[0] = asyncio.create_task(b.front.run(b.book))
        b.rollouts.feed(half[1])
        await until(lambda: len(b.scored.groups) == 2)
        assert b.scored.groups[1].rewards.tolist() == [1.0, 0.0]


async def test_each_sample_counts_once_whoever_scores_it(tmp_path):
    """A front is lost with a group that it has closed and not brought out, and with one that misses a member."""
    async with bench(SYNC, kept=KeptFigures(tmp_path / "reward.jsonl")) as b:
        b.scored.room.clear()
        stuck, half = group(0, "ok:1", "ok:3", "raise:boom"), group(1, "raise:boom", "ok:5", "ok:7")
        b.rollouts.feed(*stuck, half[0])
        await until(lambda: b.front.summary()["scoring"]["groups_scored"] == 1)
        said = b.front.summary()
        b.tasks[0].cancel()
        await asyncio.gather(b.tasks[0], return_exceptions=True)
        b.front = b.make_front()
        b.book = {"reward": await b.front.start()}
        b.tasks[0] = asyncio.create_task(b.front.run(b.book))
        await b.add_worker(1)
        await until(lambda: b.front.summary()["trajectories"] == said["trajectories"] == {"failed": 1})
        b.rollouts.feed(*stuck, *half)
        b.scored.room.set()
        await until(lambda: len(b.scored.groups) == 2)
        scoring = b.front.summary()["scoring"]
        assert (scoring["trajectories"], scoring["scored"], scoring["groups_scored"]) == (6, 4, 2)
        assert scoring["reasons"] == {"f0: raised ValueError: boom": 2}
        assert scoring["components"] == {"reward": 4.0, "f0": 4.0}


async def test_a_stream_that_the_front_before_had_ended_stays_so():
    async with bench("exact_match") as b:

        async def closed():
            raise StreamClosed("topic scored has ended")

        b.scored.close = closed
        b.rollouts.end()
        await until(lambda: b.front.status()["state"] == "drained")


async def test_members_that_never_come_fail_their_group_at_the_end_of_the_data():
    async with bench("exact_match") as b:
        b.rollouts.feed(group(0, "yes", "no")[0])
        b.rollouts.end()
        await asyncio.wait_for(b.scored.closed.wait(), 20)
        assert b.ledger.ends[0].reason == "members missing at the end of the data: 1 of 2 came"


async def test_two_workers_share_slow_samples():
    async with bench(SYNC, num_workers=2) as b:
        await until(lambda: b.front.status()["workers"] == 2)
        b.rollouts.feed(*group(0, *["pid"] * 8))
        await until(lambda: b.scored.groups)
        scored = b.scored.groups[0]
        assert isinstance(scored, ScoredGroup)
        assert len(set(scored.rewards.tolist())) == 2


async def test_stop_before_the_end_of_the_data_does_not_end_the_stream():
    async with bench("exact_match") as b:
        b.rollouts.feed(group(0, "yes", "no")[0])
        await until(lambda: b.front.in_flight())
    assert not b.scored.closed.is_set()
