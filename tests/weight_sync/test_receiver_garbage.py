"""Whatever arrives at a receiver's port that is no message of ours, or one that cannot be served, changes nothing."""

from __future__ import annotations

import asyncio
import contextlib

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import MalformedFrame
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.channel import ReceiverChannel
from asyncrl.weight_sync.receiver import WeightReceiver
from asyncrl.weight_sync.wire import KINDS, pack, unpack
from tests.weight_sync.stand_in import StagedModel, StandInTarget, a_model

numbers = st.sampled_from((-(2**63), -1, 0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1))
leaves = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.binary(max_size=8)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3))
fields = ("plan_id", "plan", "slots", "slices", "checksums", "bytes_per_second", "first", "count", "kv_policy")
headers = st.fixed_dictionaries(
    {"kind": st.sampled_from(sorted(KINDS - {"COMMIT"})) | values, "request": numbers | values},
    optional=dict.fromkeys(("incarnation", "version"), numbers | values) | dict.fromkeys(fields, values),
).map(msgpack.packb)
frames = st.lists(headers | values.map(msgpack.packb) | st.binary(max_size=40), max_size=4)
UNHASHABLE_KEY = b"\x81\x91\x01\x01"  # a map whose key is a list


@given(frame=values.map(msgpack.packb) | st.binary(max_size=60))
def test_a_header_is_a_map_or_refused_as_malformed(frame):
    with contextlib.suppress(MalformedFrame):
        assert isinstance(unpack(frame), dict)


def test_a_header_with_a_key_that_cannot_be_one_is_malformed():
    with pytest.raises(MalformedFrame):
        unpack(UNHASHABLE_KEY)


def shout(address: str, batches: list[list[bytes]]) -> None:
    """Send every multipart from a socket of its own, and wait until the receiver has read them all."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        for batch in batches:
            if batch:
                stranger.send_multipart(batch)
        stranger.send(pack({"kind": "DIGEST", "request": 77, "incarnation": 0, "version": 0}))
        while stranger.poll(10_000):
            answer = unpack(stranger.recv())
            if answer["request"] == 77 and answer["error"] == "not_committed":
                return
        raise AssertionError("the receiver is silent")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.lists(frames, max_size=12), between=st.lists(frames, max_size=12))
def test_versions_arrive_whatever_strangers_send(before, between):
    asyncio.run(updates_among(before, between))


async def updates_among(before, between):
    target = StandInTarget(a_model())
    receiver, staged = WeightReceiver(target), StagedModel(a_model(seed=1))
    address = receiver.start()
    channel = ReceiverChannel(address)
    try:
        await asyncio.to_thread(shout, address, [[UNHASHABLE_KEY], [pack({"kind": [1]})], *before])
        await channel.update(staged.order(PolicyVersion(1, 1)))
        await asyncio.to_thread(shout, address, between)
        outcome = await channel.update(staged.order(PolicyVersion(1, 2), carrier="zeromq"))
        assert outcome.verified
        assert target.commits == [PolicyVersion(1, 1), PolicyVersion(1, 2)]
        assert receiver.alive
    finally:
        await channel.close()
        receiver.close()
        staged.remove()


async def test_a_begin_that_is_refused_leaves_the_version_underway_wanted(channel, target, staged):
    order = staged.order()
    await channel._begin(order)
    stranger = ReceiverChannel(channel.address)
    answer = await stranger._send("BEGIN", PolicyVersion(2**62, 0), plan_id="nobody's", plan=None)
    assert answer["error"] == "unknown_plan"
    assert (await channel._fetch(order, None))["refused"] == []
    await stranger.close()
