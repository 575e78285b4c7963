"""The receiver: what it commits, what it refuses, and that it lives on."""

from __future__ import annotations

import asyncio

import pytest
import torch
import zmq

from asyncrl.errors import DeadlineExceeded, DigestMismatch, PlanMismatch, StaleIncarnation, SyncError
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.channel import Progress, ReceiverChannel
from asyncrl.weight_sync.receiver import WeightReceiver
from asyncrl.weight_sync.wire import pack, unpack
from tests.waiting import until
from tests.weight_sync.stand_in import StagedModel, StandInTarget, a_model

CARRIERS = ["shared_memory", "zeromq"]
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


async def until_begun(channel: ReceiverChannel) -> None:
    async def has_begun() -> bool:
        return (await channel.status(5))["begun"] == str(V1)

    await until(has_begun)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_version_arrives_bit_for_bit_and_is_verified(carrier, dtype):
    sent, target = a_model(seed=1, dtype=dtype), StandInTarget(a_model(dtype=dtype))
    staged, receiver = StagedModel(sent), WeightReceiver(target)
    channel = ReceiverChannel(receiver.start())
    outcome = await channel.update(staged.order(carrier=carrier))
    assert target.holds(sent)
    assert (outcome.verified, outcome.refused, outcome.pause_seconds) == (True, 0, 0.001)
    assert outcome.num_bytes >= staged.plan.num_bytes
    assert (await channel.status(5))["committed"] == "1.1"
    await channel.close()
    receiver.close()
    staged.remove()


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_flipped_byte_is_never_committed(channel, target, staged, carrier):
    staged.flip()
    refused = []
    with pytest.raises(DigestMismatch, match="1 slices arrived wrong 4 times"):
        await channel.update(staged.order(carrier=carrier), Progress(refused=refused.append))
    assert refused == [1] * 4
    assert target.commits == []


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_slice_that_arrived_wrong_is_sent_again_alone(channel, target, staged, carrier):
    staged.flip()
    outcome = await channel.update(staged.order(carrier=carrier), Progress(refused=lambda count: staged.flip()))
    assert (outcome.refused, outcome.verified) == (1, True)
    assert outcome.num_bytes < 2 * staged.plan.num_bytes
    assert target.holds(a_model(seed=1))


async def test_weights_that_change_on_their_way_to_life_are_found_by_the_digest(channel, target, staged):
    target.spoil = True
    unverified = []
    with pytest.raises(DigestMismatch, match=r"live parameters differ from those sent, first embed\.weight"):
        await channel.update(staged.order(), Progress(unverified=unverified.append))
    assert unverified == ["differs"]


async def test_an_incomplete_version_is_not_committed(channel, target, staged):
    order = staged.order()
    await channel._begin(order)
    await channel._fetch(order, [0, 1])
    answer = await channel._send("COMMIT", order.version, kv_policy="keep")
    assert answer["error"] == "incomplete"
    assert target.commits == []


async def test_a_committed_version_cannot_be_committed_twice(channel, target, staged):
    await channel.update(staged.order())
    answer = await channel._send("COMMIT", V1, kv_policy="keep")
    assert answer["error"] == "not_begun"
    assert target.commits == [V1]


async def test_an_older_incarnation_is_refused_and_a_newer_one_wins_whatever_its_version(channel, target, staged):
    await channel.update(staged.order(PolicyVersion(2, 50)))
    with pytest.raises(StaleIncarnation, match="incarnation 1 is over, 2 has begun"):
        await channel.update(staged.order(PolicyVersion(1, 99)))
    await channel.update(staged.order(PolicyVersion(3, 0)))
    assert target.commits == [PolicyVersion(2, 50), PolicyVersion(3, 0)]


async def test_an_older_version_is_refused(channel, target, staged):
    await channel.update(staged.order(V2))
    with pytest.raises(SyncError, match=r"old_version: 1\.2 is live, 1\.1 is older"):
        await channel.update(staged.order(V1))


async def test_versions_follow_each_other_through_the_same_staging_tensors(channel, target):
    for version in range(1, 5):
        sent = a_model(seed=version)
        staged = StagedModel(sent)
        await channel.update(staged.order(PolicyVersion(1, version)))
        assert target.holds(sent)
        staged.remove()


async def test_status_is_answered_while_a_commit_waits_for_a_decode_step(channel, target, staged):
    target.gate.clear()
    update = asyncio.create_task(channel.update(staged.order()))
    for _ in range(3):
        assert (await channel.status(2))["committed"] is None
    target.gate.set()
    assert (await update).verified


async def test_a_move_past_its_deadline_raises(channel, target, staged):
    target.gate.clear()
    unverified = []
    with pytest.raises(DeadlineExceeded, match=r"within 0.2 s \(sync.timeout_seconds\)"):
        await channel.update(staged.order(timeout_seconds=0.2), Progress(unverified=unverified.append))
    assert unverified == ["unanswered"], "whether it went live cannot be said"
    with pytest.raises(DeadlineExceeded, match=r"raise sync.timeout_seconds or sync.max_megabytes_per_second"):
        await channel.update(staged.order(V2, timeout_seconds=0.2))
    target.gate.set()


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_newer_version_ends_the_reading_of_an_older_one(channel, target, staged, carrier):
    slow = asyncio.create_task(channel.update(staged.order(V1, carrier=carrier, bytes_per_second=2000.0)))
    await until_begun(channel)
    await channel.update(staged.order(V2, carrier=carrier))
    with pytest.raises(SyncError, match=r"superseded|not_begun"):
        await slow
    assert target.commits == [V2]


async def test_a_cancelled_version_is_given_up_at_once(channel, target, staged):
    slow = asyncio.create_task(channel.update(staged.order(bytes_per_second=500.0)))
    await until_begun(channel)
    channel.cancel(V1)
    with pytest.raises(SyncError, match="superseded"):
        await slow


async def test_a_slot_written_over_while_it_is_read_is_refused(channel, target, staged):
    slow = asyncio.create_task(channel.update(staged.order(bytes_per_second=20_000.0)))
    await until_begun(channel)
    staged.memory[:] = bytes(len(staged.memory))
    with pytest.raises(DigestMismatch):
        await slow
    assert target.commits == []


async def test_a_plan_that_does_not_fit_the_model_names_the_parameter(channel):
    other = StagedModel(a_model(rows=40))
    with pytest.raises(PlanMismatch, match=r"embed.weight: the plan has \(40, 8\) float32, the server \(50, 8\)"):
        await channel.update(other.order())
    other.remove()


async def test_a_slot_that_is_gone_is_an_error_and_the_receiver_lives_on(channel, target, staged):
    with pytest.raises(SyncError, match="failed: staging slot asyncrl-nowhere-r0-s0 is gone"):
        await channel.update(staged.order(slots=("asyncrl-nowhere-r0-s0",)))
    assert (await channel.update(staged.order(V2))).verified


async def test_a_restarted_receiver_is_told_the_plan_again(target, staged):
    first = WeightReceiver(target)
    address = first.start()
    channel = ReceiverChannel(address)
    await channel.update(staged.order())
    session = (await channel.status(5))["session"]
    first.close()
    second = WeightReceiver(target, bind=address)
    second.start()
    assert (await channel.update(staged.order(V2))).verified
    assert (await channel.status(5))["session"] != session
    await channel.close()
    second.close()


GARBAGE = {
    "not msgpack": [b"\xc1"],
    "no map": [pack([1])],  # type: ignore[arg-type]
    "unknown kind": [pack({"kind": "DANCE", "request": 1, "incarnation": 1, "version": 1})],
    "no version": [pack({"kind": "COMMIT", "request": 1, "incarnation": 1})],
    "too many frames": [pack({"kind": "STATUS", "request": 1, "incarnation": 1, "version": 1}), b"", b""],
    "nothing": [],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_counted_and_answered(address, channel, target, staged, frames):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send_multipart(frames or [b""])
        assert await asyncio.to_thread(socket.poll, 5000)
        assert unpack(socket.recv())["error"] == "malformed"
    assert (await channel.status(5))["malformed"] == 1
    assert (await channel.update(staged.order())).verified


async def test_fields_that_make_no_sense_are_refused(channel, staged):
    await channel._begin(staged.order())
    answer = await channel._send("FETCH", V1, slots=[], checksums=b"", slices=[0])
    assert answer["error"] == "malformed"
    answer = await channel._send("BUCKET", V1, memoryview(b"abc"), first=10_000, count=1, checksums=b"")
    assert answer["error"] == "malformed"


def test_closing_ends_a_throttled_transfer_and_both_threads(target, staged):
    async def begin_and_leave() -> None:
        channel = ReceiverChannel(address)
        task = asyncio.create_task(channel.update(staged.order(bytes_per_second=500.0)))
        await until_begun(channel)
        task.cancel()
        await channel.close()

    receiver = WeightReceiver(target)
    address = receiver.start()
    threads = list(receiver._threads)
    asyncio.run(begin_and_leave())
    receiver.close()
    assert not any(thread.is_alive() for thread in threads)
