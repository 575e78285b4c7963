"""Garbage into everything that decodes: no crash, nothing accepted that is no message, and memory stays what it is."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from asyncrl.errors import FrameError, MalformedFrame, PlanMismatch, SyncError, TransportError
from asyncrl.messages import codec
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.transport import blocks, envelopes, values, wire
from asyncrl.transport.client import QueueReceiver, QueueSender
from asyncrl.transport.rpc import call_once
from asyncrl.weight_sync import receiver
from asyncrl.weight_sync import wire as weights
from asyncrl.weight_sync.channel import ReceiverChannel
from asyncrl.weight_sync.plan import Plan, check_cover, merge, plan_rank
from asyncrl.weight_sync.shards import local_shards
from tests.chaos.garbage import Frames, Garbage, pack, resident_bytes
from tests.end_to_end.runs import ROOT
from tests.messages.samples import scored_group, trajectory
from tests.weight_sync.stand_in import StagedModel, a_model

LATER = itertools.count(2**40)  # versions that no garbage begins: it has another incarnation or another version, not both
MAX_BYTES = 1 << 20
MARK = bytes((0x7F, 1, 2, 3, 4, 5, 6, 7))
MARK_NUMBER = int.from_bytes(MARK, "big")  # msgpack has it in these bytes
MESSAGES = [trajectory(), trajectory(3, 2, num_tokens=0), scored_group(), scored_group(2, lengths=(1, 0, 4))]


def a_plan() -> Plan:
    shards = [local.shard for local in local_shards(a_model().items(), rank=0, wire_dtype=None)]
    return merge([plan_rank(shards, rank=0, world_size=1, bucket_bytes=600)])


def split(payload: bytes) -> Frames:
    """[header, the rest] of a payload, so that the header can be changed; `joined` puts them together again."""
    size = int.from_bytes(payload[:8], "little")
    return [payload[8 : 8 + size], payload[8 + size + (-size & 7) :]]


def joined(frames: Frames) -> bytes:
    header, *rest = frames or [b""]
    body = len(header).to_bytes(8, "little") + header + bytes(-len(header) & 7) + b"".join(rest)
    return body + bytes(-len(body) % 8)


# ── what each decoder says is a message, and how to see that it is one ───────────────────────────────────────────────


def frames_of_codec(frames: Frames) -> None:
    message = codec.decode(frames, max_bytes=MAX_BYTES)
    again = codec.decode(codec.encode(message), max_bytes=MAX_BYTES)
    assert codec.encode(again) == codec.encode(message)


def payload_of_codec(frames: Frames) -> None:
    message = codec.from_payload(joined(frames))
    assert codec.to_payload(codec.from_payload(codec.to_payload(message))) == codec.to_payload(message)


def raw_payload_of_codec(frames: Frames) -> None:
    codec.to_payload(codec.from_payload(b"".join(frames)))


def enveloped(frames: Frames) -> None:
    message = envelopes.unpack("0/0/0/0", joined(frames))
    assert str(message.id) == "0/0/0/0"


def values_of_rpc(frames: Frames) -> None:
    value = values.unpack_values(frames)
    values.pack_values(value)
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += [part for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            left += item
        else:
            assert item is None or isinstance(item, (bool, int, float, str, bytes, np.ndarray))


def said_to_broker(frames: Frames) -> None:
    same_again(wire.read_from_client, frames)


def said_by_broker(frames: Frames) -> None:
    same_again(wire.read_from_broker, frames)


def same_again(read: Callable[[Any], tuple[str, list[Any], list[memoryview]]], frames: Frames) -> None:
    kind, fields, payloads = read(frames)
    carries = kind in ("write", "deliver")
    assert carries or not payloads
    assert read(wire.write_frames([kind, *fields], blocks.gathered(payloads) if carries else None)) == (kind, fields, payloads)


def header_of_weights(frames: Frames) -> None:
    header, payload = receiver._parse([zmq.Frame(b"peer"), *map(zmq.Frame, frames)])
    assert header["kind"] in weights.KINDS
    assert payload.dtype == np.uint8
    assert all(type(header[name]) is int and header[name] >= 0 for name in ("request", "incarnation", "version"))


def plan_of_weights(frames: Frames) -> None:
    plan = Plan.from_wire(weights.unpack(frames[0] if frames else b""))
    for index, tensor in enumerate(plan.tensors):
        check_cover(tensor, [(piece.offset, piece.size) for piece in plan.slices if piece.tensor == index])
    assert Plan.from_wire(plan.to_wire()) == plan


def corpora() -> dict[Callable[[Frames], None], list[Frames]]:
    payloads = [codec.to_payload(message) for message in MESSAGES]
    ids = [[codec.envelope(message)[part] for message in MESSAGES] for part in (0, 1)]
    sent = blocks.gathered(payloads)
    header = {"kind": "BUCKET", "request": 1, "incarnation": 1, "version": 2, "first": 0, "count": 1, "checksums": b"\0" * 4}
    plan = a_plan().to_wire()
    call = values.pack_values(["score", {"items": [{"a": 1, "b": "x"}], "array": np.arange(6, dtype=np.float32).reshape(2, 3)}])
    return {
        frames_of_codec: [codec.encode(message) for message in MESSAGES],
        payload_of_codec: [split(payload) for payload in payloads],
        raw_payload_of_codec: [[payload] for payload in payloads],
        enveloped: [split(payloads[0])],
        values_of_rpc: [call, values.pack_values([True, {"ids": ["0/0/0"], "none": None}])],
        said_to_broker: [
            *[[pack(body)] for body in (
                ["sender", "rollouts", "rollouter", 1], ["announce", "rollouts", 0, [5, 6]], ["close", "rollouts"],
                ["receiver", "scored", "trainer", 2], ["take", "scored", 1, 5, 0], ["cancel", "scored", 1], ["lost", "scored", 1],
                ["settle", "scored", ["0/0/0"]], ["refuse", "scored", "0/0/0", "why"], ["leave", "scored"],
            )],
            list(map(bytes, wire.write_frames(["write", "rollouts", 0, *ids], sent))),
        ],
        said_by_broker: [
            *[[pack(body)] for body in (
                ["failed", 1, "MalformedFrame", "why"], ["closed"], ["end", 1], ["left"], ["error", "StreamClosed", "why"],
            )],
            list(map(bytes, wire.write_frames(["deliver", 1, 1, 0, ids[0]], sent))),
        ],
        header_of_weights: [[pack(header), b"\0" * 16], [pack({**header, "kind": "BEGIN", "plan": plan, "plan_id": "x"})]],
        plan_of_weights: [[pack(plan)]],
    }  # fmt: skip


def feed(decoder: Callable[[Frames], None], corpus: list[Frames], number: int, seed: int) -> int:
    """How many of so many multiparts were accepted; the test fails for one that neither is a message nor refused as none."""
    garbage, accepted = Garbage(seed, corpus), 0
    for _ in range(number):
        frames = garbage.frames()
        try:
            decoder(frames)
            accepted += 1
        except (FrameError, PlanMismatch):
            pass
        except BaseException as error:
            error.add_note(f"{decoder.__name__} of {[frame.hex() for frame in frames]}")
            raise
    return accepted


@contextmanager
def a_staged_model() -> Iterator[StagedModel]:
    staged = StagedModel(a_model(seed=1))
    try:
        yield staged
    finally:
        staged.remove()


@pytest.mark.parametrize("decoder", list(corpora()), ids=lambda decoder: decoder.__name__)
def test_what_is_decoded_is_a_message_or_refused(decoder):
    corpus = corpora()[decoder]
    for frames in corpus:
        decoder(frames)
    feed(decoder, corpus, 2000, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_of_them_leave_memory_as_it_was():
    share = 1_000_000 // len(corpora())
    for number, (decoder, corpus) in enumerate(corpora().items()):
        feed(decoder, corpus, share // 10, seed=100 + number)
        before = resident_bytes()
        accepted = feed(decoder, corpus, share - share // 10, seed=200 + number)
        grown = resident_bytes() - before
        print(f"{decoder.__name__}: {accepted} of {share} were messages, {grown / 1e6:.1f} MB more")
        assert grown < 4e6


# ── sockets: a process with every kind of them, and strangers that shout at it ───────────────────────────────────────


class Shouted:
    """The process of `tests.chaos.doors` on loopback, where nobody is asked who he is."""

    def __init__(self, run_dir: Path):
        command = [sys.executable, "-W", "error", "-m", "tests.chaos.doors", "serve", str(run_dir), "127.0.0.1"]
        self.log = run_dir / "errors.log"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
            )
        self.addresses: dict[str, str] = json.loads(self.process.stdout.readline())

    def stats(self) -> dict[str, Any]:
        return dict(call_once(self.addresses["rpc"], "stats", timeout=30))

    def resident_bytes(self) -> int:
        return resident_bytes(psutil.Process(self.process.pid))

    def end(self) -> None:
        assert self.process.poll() is None, self.log.read_text()
        self.process.communicate("", timeout=60)
        assert self.process.returncode == 0
        failures = [line for line in self.log.read_text().splitlines() if "a peer is silent" not in line]
        assert failures == [], "nothing failed that nobody had thought of"


@pytest.fixture
def shouted(tmp_path):
    served = Shouted(tmp_path)
    yield served
    served.end()


def shout(address: str, garbage: Garbage, number: int, *, head: Frames, last: Frames, per_socket: int = 500) -> None:
    """So many multiparts, from strangers that come and go. Each leaves when its `last` word has been answered, so that what they
    said has been read. head: frames before those of the garbage."""
    with zmq.Context() as context:
        for _ in range(number // per_socket):
            with context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(address)
                for _ in range(per_socket):
                    stranger.send_multipart([*head, *(garbage.frames() or [b""])])
                stranger.send_multipart(last)
                while not any(MARK in frame for frame in stranger.recv_multipart()):
                    assert stranger.poll(20_000), "the last word is not answered"


def corpus_of(kind: str) -> tuple[list[Frames], Frames, Frames]:
    """(legal multiparts, what stands before them, a last word whose answer has MARK in it). Nobody says that a stream has ended:
    it would be believed."""
    by_decoder = corpora()
    if kind == "rpc":
        return by_decoder[values_of_rpc], [b"12345678"], [MARK, pack(["nobody's", {}])]
    if kind == "broker":
        said = [frames for frames in by_decoder[said_to_broker] if b"close" not in frames[0]]
        opening = [[pack(["sender", "rollouts", "rollouter", 1])]] * 4
        return said + opening, [], [pack(["receiver", "rollouts", "stranger", MARK_NUMBER])]
    begin, plan, few = {"request": 1, "incarnation": 1, "version": 1}, a_plan(), b"\0" * 4
    every = few * len(plan.slices)
    headers: list[dict[str, Any]] = [
        {"kind": "BEGIN", "plan_id": plan.id, "plan": plan.to_wire()},
        {"kind": "FETCH", "slots": ["asyncrl-nobody-r0-s0"], "slices": [0, 1], "checksums": every, "bytes_per_second": None},
        {"kind": "COMMIT", "kv_policy": "keep"},
        {"kind": "DIGEST"},
        {"kind": "STATUS"},
        {"kind": "CANCEL"},
    ]
    bucket = [pack({"kind": "BUCKET", "first": 0, "count": 1, "checksums": few, **begin}), b"\0" * plan.slices[0].num_bytes]
    last = [pack({"kind": "DIGEST", **begin, "request": MARK_NUMBER})]
    return [bucket, *([pack({**header, **begin})] for header in headers)], [], last


def shout_at(served: Shouted, kind: str, number: int, *, seed: int) -> None:
    corpus, head, last = corpus_of(kind)
    shout(served.addresses[kind], Garbage(seed, corpus), number, head=head, last=last)


async def assert_still_serves(served: Shouted) -> None:
    """Calls, messages and versions go through as if nothing had been."""
    assert await asyncio.to_thread(call_once, served.addresses["rpc"], "record", timeout=10, what="ours") >= 1
    sender = QueueSender(served.addresses["broker"], "rollouts", producer="rollouter", silence_seconds=20)
    receiver = QueueReceiver(served.addresses["broker"], "rollouts", consumer="ours", heartbeat_seconds=0.2, silence_seconds=20)
    await sender.send([trajectory(row=7_000)])
    async with asyncio.timeout(30):
        found = set()
        while str(trajectory(row=7_000).id) not in found:
            found |= {str(delivery.message.id) for delivery in await receiver.receive(max_items=64, timeout=5)}
    sender.abandon()
    receiver.abandon()
    channel = ReceiverChannel(served.addresses["weights"])
    try:
        with a_staged_model() as staged:
            assert (await channel.update(staged.order(PolicyVersion(2**63 - 1, next(LATER)), carrier="zeromq"))).verified
    finally:
        await channel.close()


async def test_sockets_outlive_what_strangers_send(shouted):
    for kind in ("rpc", "broker", "weights"):
        await asyncio.to_thread(shout_at, shouted, kind, 1500, seed=5)
        await assert_still_serves(shouted)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["rpc", "broker", "weights"])
async def test_a_hundred_thousand_of_them_leave_a_sockets_process_as_it_was(shouted, kind):
    await asyncio.to_thread(shout_at, shouted, kind, 10_000, seed=6)
    await assert_still_serves(shouted)
    before, descriptors = shouted.resident_bytes(), psutil.Process(shouted.process.pid).num_fds()
    await asyncio.to_thread(shout_at, shouted, kind, 90_000, seed=7)
    stats = shouted.stats()
    grown = shouted.resident_bytes() - before
    print(f"{kind}: {grown / 1e6:.1f} MB more; {stats[kind]}")
    assert grown < 10e6
    assert psutil.Process(shouted.process.pid).num_fds() <= descriptors + 4
    await assert_still_serves(shouted)


def answering(frames: Frames, asked: bytes) -> Frames:
    """A header among them becomes one that the other side waits for."""
    try:
        return [pack({**weights.unpack(frames[0]), "request": weights.unpack(asked)["request"]}), *frames[1:]]
    except MalformedFrame:
        return frames


async def test_a_channel_outlives_what_stands_where_its_receiver_was():
    """ParameterSync speaks to whoever has the address: answers that are none end the update, by its deadline at the latest."""
    whole = {"session": "s", "ok": True, "refused": [], "bytes": 1, "pause_seconds": 0.1, "recompute_seconds": 0.0}
    answers = Garbage(
        9, [[pack({**whole, "checksums": b"\0" * 4 * len(a_plan().slices)})], [pack({"error": "failed", "text": "?"})]]
    )
    with a_staged_model() as staged, zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.setsockopt(zmq.LINGER, 0)
        address = f"tcp://127.0.0.1:{impostor.bind_to_random_port('tcp://127.0.0.1')}"
        ended = threading.Event()

        def answer() -> None:
            while not ended.is_set():
                if impostor.poll(50):
                    peer, asked, *_ = impostor.recv_multipart()
                    for _ in range(10):
                        impostor.send_multipart([peer, *answering(answers.frames() or [b""], asked)])

        thread = threading.Thread(target=answer)
        thread.start()
        channel = ReceiverChannel(address)
        try:
            for number in range(1, 40):
                with pytest.raises((SyncError, TransportError, FrameError)):
                    await channel.update(staged.order(PolicyVersion(1, number), carrier="zeromq", timeout_seconds=0.1))
        finally:
            ended.set()
            thread.join()
            await channel.close()
