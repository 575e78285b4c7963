"""Garbage into everything that decodes: no crash, nothing accepted that is no message, and memory stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl.errors import FrameError, PlanMismatch
from asyncrl.messages import codec
from asyncrl.transport import blocks, envelopes, values, wire
from asyncrl.weight_sync import receiver
from asyncrl.weight_sync import wire as weights
from asyncrl.weight_sync.plan import Plan, check_cover, merge, plan_rank
from asyncrl.weight_sync.shards import local_shards
from tests.chaos.garbage import Frames, Garbage, pack, resident_bytes
from tests.messages.samples import scored_group, trajectory
from tests.weight_sync.stand_in import a_model

MAX_BYTES = 1 << 20
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
