"""A scheduler's parameters, updated by the real receiver over its socket while a thread stands in for the scheduler's loop."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from asyncrl.engines.sglang.target import SchedulerTarget
from asyncrl.errors import DeadlineExceeded, PlanMismatch
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.channel import ReceiverChannel
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.engines.sglang.fused import PADDED, VOCABULARY, FusedModel, hugging_face_weights, shapes_of
from tests.weight_sync.stand_in import StagedModel, TwoRankModel


class StandInScheduler:
    """Steps as fast as it can, or sleeps until it is woken; notes what it was told, in order."""

    def __init__(self, *, sleeps: bool = False, commit_seconds: float = 10.0):
        self.model, self.told, self._sleeps = FusedModel(), [], sleeps
        self._woken, self._ends = threading.Event(), threading.Event()
        self.target = SchedulerTarget(
            self.model,
            announce=lambda version: self.told.append(version),
            recompute=self._recompute,
            wake=self._woken.set,
            commit_seconds=commit_seconds,
        )

    def _recompute(self, exchange) -> None:
        self.told.append("retracted")
        exchange()
        self.told.append("goes on")

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            self._woken.set()
            thread.join(5)
            assert not thread.is_alive()

    def _run(self) -> None:
        while not self._ends.is_set():
            if self._sleeps:
                assert self._woken.wait(10)
                self._woken.clear()
            self.target.between_steps()
            time.sleep(0.001)

    def holds(self, weights) -> bool:
        expected = FusedModel()
        expected.load_weights(weights.items())
        return all(torch.equal(*pair) for pair in zip(expected.parameters(), self.model.parameters(), strict=True))


@pytest.fixture(params=["shared_memory", "zeromq"])
def carrier(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["steps", "sleeps"])
def scheduler(request):
    with StandInScheduler(sleeps=request.param).running() as running:
        yield running


async def bring(target: SchedulerTarget, *versions, kv_policy: str = "keep", carrier: str = "shared_memory"):
    """Publish these weights one after the other as versions 1.1, 1.2, …; what each update came to."""
    receiver = WeightReceiver(target)
    channel = ReceiverChannel(receiver.start())
    outcomes = []
    try:
        for number, weights in enumerate(versions, 1):
            staged = StagedModel(weights)
            try:
                order = staged.order(PolicyVersion(1, number), kv_policy=kv_policy, carrier=carrier)
                outcomes.append(await channel.update(order))
            finally:
                staged.remove()
    finally:
        await channel.close()
        receiver.close()
    return outcomes


async def test_versions_become_the_schedulers_fused_parameters(scheduler, carrier):
    versions = [hugging_face_weights(seed) for seed in range(3)]
    outcomes = await bring(scheduler.target, *versions, carrier=carrier)
    assert all(outcome.verified for outcome in outcomes)
    assert scheduler.told == ["1.1", "1.2", "1.3"]
    assert scheduler.holds(versions[-1])


async def test_the_halves_of_two_ranks_become_the_schedulers_fused_parameters(scheduler, carrier):
    weights, receiver = hugging_face_weights(), WeightReceiver(scheduler.target)
    channel, staged = ReceiverChannel(receiver.start()), TwoRankModel(weights)
    try:
        assert (await channel.update(staged.order(carrier=carrier))).verified
        assert scheduler.holds(weights)
    finally:
        staged.remove()
        await channel.close()
        receiver.close()


async def test_the_padding_of_a_vocabulary_stays_as_it_was(scheduler):
    scheduler.model.embed.data[VOCABULARY:] = 5
    await bring(scheduler.target, hugging_face_weights(0), hugging_face_weights(1))
    assert scheduler.model.embed[VOCABULARY:].eq(5).all()
    assert len(scheduler.model.embed) == PADDED


async def test_recompute_retracts_what_runs_round_the_swap(scheduler):
    await bring(scheduler.target, hugging_face_weights(), kv_policy="recompute")
    assert scheduler.told == ["retracted", "1.1", "goes on"]


async def test_a_model_of_another_shape_is_refused_before_anything_is_written(scheduler):
    weights = hugging_face_weights()
    weights["layers.0.q"] = torch.randn(9, 8)
    with pytest.raises(PlanMismatch):
        await bring(scheduler.target, weights)
    assert scheduler.told == []


def test_a_scheduler_that_never_comes_to_it_changes_nothing():
    scheduler, weights = StandInScheduler(commit_seconds=0.05), hugging_face_weights()
    scheduler.target.find(shapes_of(weights))
    before = [parameter.clone() for parameter in scheduler.model.parameters()]
    with pytest.raises(DeadlineExceeded, match=r"sync\.timeout_seconds"):
        scheduler.target.commit(scheduler.target.spare(), PolicyVersion(1, 1), "keep")
    scheduler.target.between_steps()
    assert all(torch.equal(*pair) for pair in zip(before, scheduler.model.parameters(), strict=True))
    assert scheduler.told == []


def test_an_error_in_the_scheduler_is_the_commits_and_the_scheduler_lives():
    scheduler, weights = StandInScheduler(), hugging_face_weights()

    def fails(version: str) -> None:
        raise RuntimeError("no such context")

    scheduler.target._announce = fails
    scheduler.target.find(shapes_of(weights))
    with scheduler.running(), pytest.raises(RuntimeError, match="no such context"):
        scheduler.target.commit(scheduler.target.spare(), PolicyVersion(1, 1), "keep")
