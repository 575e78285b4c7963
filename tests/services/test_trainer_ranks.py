"""Leader and followers, their commands, and one conformance suite for training engines, the real one and the fake."""

from __future__ import annotations

import asyncio
import queue
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.clock import SystemClock
from asyncrl.errors import CheckpointError, MalformedFrame, TransportError
from asyncrl.protocols import TrainBatch
from asyncrl.services.trainer import TrainerParts, TrainerService
from asyncrl.services.trainer.commands import (
    FinishSave,
    Judge,
    Load,
    Publish,
    Save,
    Stop,
    Tick,
    Train,
    decode_command,
    encode_command,
)
from asyncrl.services.trainer.ranks import Ranks, follow
from asyncrl.simulation.training import FakeLauncher, FakeTrainingEngine
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank, group
from tests.models import tiny_model
from tests.services.trainer_world import ListPublisher

# ---- commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [Tick(), Publish(7, 1), Save("run/a"), FinishSave(2.5), Load("run/b"), Stop("rank 0 failed"), Stop()]
)
def test_commands_travel_whole(command):
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize("command", [Train, lambda sent: Judge(sent, 0.7, True)], ids=["train", "judge"])
def test_a_batch_travels_whole(command):
    sent = batch(5, mini_batches=2, epochs=3)
    whole = command(sent)
    received = decode_command(encode_command(whole))
    assert replace(received, batch=sent) == whole
    received = received.batch
    assert replace(received, groups=()) == replace(sent, groups=())
    for mine, theirs in zip(received.groups, sent.groups, strict=True):
        assert mine.id == theirs.id
        np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)
        np.testing.assert_array_equal(mine.loss_mask, theirs.loss_mask)
        np.testing.assert_array_equal(mine.rewards, theirs.rewards)


def test_what_is_no_command_is_refused():
    with pytest.raises(MalformedFrame, match="no trainer command"):
        decode_command(b"\x91\xa4jump")


# ---- leader and follower ---------------------------------------------------------------------------------------


class Pair:
    """The group of two ranks in one process: what rank 0 broadcasts, rank 1 receives."""

    def __init__(self):
        self.wire = queue.Queue()
        self.engines = [PairedEngine(self.wire, rank) for rank in range(2)]
        self.publishers = [ListPublisher(), ListPublisher()]
        for publisher in self.publishers:
            publisher.register()


class PairedEngine(FakeTrainingEngine):
    def __init__(self, wire, rank):
        super().__init__()
        self._wire, self._rank = wire, rank

    @property
    def rank(self):
        return self._rank

    @property
    def world_size(self):
        return 2

    def broadcast(self, payload):
        if payload is not None:
            self._wire.put(payload)
            return payload
        received = self._wire.get(timeout=30)
        if received == b"dead":
            raise TransportError("trainer/1: another trainer rank is gone")
        return received


async def test_a_follower_does_what_the_leader_does():
    pair = Pair()
    following = asyncio.create_task(follow(pair.engines[1], pair.publishers[1], asyncio.to_thread))
    leader = Ranks(pair.engines[0], pair.publishers[0], asyncio.to_thread)
    await leader.publish(0)
    await leader.tick()
    await leader.train(batch(3))
    await leader.publish(1)
    await leader.dismiss("")
    await following
    assert pair.publishers[0].staged == pair.publishers[1].staged == [(0, 0), (1, 1)]
    assert [len(engine.batches) for engine in pair.engines] == [1, 1]


async def test_a_save_that_fails_on_every_rank_leaves_them_in_step(tmp_path):
    pair = Pair()
    following = asyncio.create_task(follow(pair.engines[1], pair.publishers[1], asyncio.to_thread))
    leader = Ranks(pair.engines[0], pair.publishers[0], asyncio.to_thread)
    for engine in pair.engines:
        engine.save_failure, engine.save_seconds = (lambda folder: "the disk is full"), 0.0
    await leader.begin_save(str(tmp_path))
    with pytest.raises(CheckpointError, match="the disk is full"):
        await leader.finish_save(5.0)
    with pytest.raises(CheckpointError, match="holds no state"):
        await leader.load(str(tmp_path / "none"))
    await leader.load(str(tmp_path))
    await leader.train(batch(1))
    await leader.dismiss("")
    await following
    assert [engine.loaded for engine in pair.engines] == [str(tmp_path)] * 2
    assert [len(engine.batches) for engine in pair.engines] == [1, 1]


async def test_ranks_out_of_step_are_told_nothing_more():
    pair = Pair()
    leader = Ranks(pair.engines[0], pair.publishers[0], asyncio.to_thread)
    pair.engines[0].outcome = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await leader.train(batch(1))
    await leader.dismiss("rank 0 failed")
    assert pair.wire.qsize() == 1, "the train command alone"


async def test_a_follower_raises_when_rank_zero_is_gone():
    pair = Pair()
    pair.wire.put(b"dead")
    with pytest.raises(TransportError, match="is gone"):
        await follow(pair.engines[1], pair.publishers[1], asyncio.to_thread)


async def test_a_service_of_rank_one_follows_and_closes_its_publisher(tmp_path):
    pair = Pair()
    publisher = ListPublisher()

    async def connect(book, engine):
        return TrainerParts(publisher)

    launcher = FakeLauncher(pair.engines[1])
    service = TrainerService(config(), tmp_path, 1, launcher=launcher, connect=connect, clock=SystemClock())
    addresses = await service.start()
    assert set(addresses) == {"rpc"}
    running = asyncio.create_task(service.run({"trainer/0": {"rpc": "", "meeting_point": "127.0.0.1:1"}}))
    pair.wire.put(encode_command(Publish(0, 0)))
    pair.wire.put(encode_command(Stop()))
    await running
    assert publisher.staged == [(0, 0)]
    assert publisher.closed
    assert service.summary() == {}


# ---- conformance -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fake", "fsdp"])
def engine(request, tmp_path_factory):
    if request.param == "fake":
        yield FakeTrainingEngine()
        return
    model = tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB)
    with engine_of_one_rank(model, config(), DcpFiles()) as real:
        yield real


@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (3, 1), (2, 2)])
def test_a_batch_makes_one_update_per_mini_batch_and_pass(engine, mini_batches, epochs):
    outcome = engine.train(batch(mini_batches=mini_batches, epochs=epochs))
    assert (outcome.updates, outcome.bad_updates) == (mini_batches * epochs, 0)
    assert all(isinstance(value, float) for value in outcome.metrics.values())
    assert "grad/norm" in outcome.metrics


def test_an_empty_batch_makes_no_update(engine):
    outcome = engine.train(TrainBatch(1, 0, 1e-3, (), ()))
    assert (outcome.updates, outcome.bad_updates) == (0, 0)


def test_a_batch_of_one_group_trains(engine):
    assert engine.train(TrainBatch(1, 3, 1e-3, (group(0),), ((0,),))).updates == 1


def test_rank_zero_hears_its_own_broadcast(engine):
    assert (engine.rank, engine.world_size) == (0, 1)
    assert engine.broadcast(b"payload") == b"payload"


def test_what_is_saved_is_loaded_and_a_save_is_finished_before_the_next(engine, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert engine.begin_save(str(tmp_path / name)) >= 0
        assert engine.finish_save(60.0) >= 0
        assert engine.save_done()
        engine.load(str(tmp_path / name))
    assert engine.train(batch(2)).updates == 1


def test_a_folder_without_a_state_is_no_checkpoint(engine, tmp_path):
    with pytest.raises(CheckpointError):
        engine.load(str(tmp_path))
