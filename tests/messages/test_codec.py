"""Frames become exactly the message that was encoded, or a FrameError; nothing in between."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import FrameError, MalformedFrame, OversizedFrame, TruncatedFrame, UnknownSchema, UnknownTag
from asyncrl.messages import GreedyResponse, Trajectory
from asyncrl.messages.codec import Message, decode, encode, envelope, from_payload, to_payload
from tests.messages import samples

LIMIT = 1 << 20
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_equal(left: Message, right: Message) -> None:
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        before, after = getattr(left, field.name), getattr(right, field.name)
        if field.name == "components":
            assert list(before) == list(after)
            before, after = np.array(list(before.values())), np.array(list(after.values()))
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(before, after)
        else:
            np.testing.assert_equal(after, before)  # NaN equals itself here


@many
@given(message=samples.messages)
def test_every_message_survives_encoding_as_frames_and_as_one_payload(message):
    frames = encode(message)
    assert_equal(decode(frames, max_bytes=LIMIT), message)
    assert_equal(from_payload(to_payload(message)), message)


@many
@given(frames=st.lists(st.binary(max_size=64), max_size=8))
def test_random_frames_only_ever_raise_a_frame_error(frames):
    with pytest.raises(FrameError):
        decode(frames, max_bytes=LIMIT)


@many
@given(header=samples.plain_values, frames=st.lists(st.binary(max_size=16), max_size=3))
def test_random_msgpack_headers_only_ever_raise_a_frame_error(header, frames):
    with pytest.raises(FrameError):
        decode([msgpack.packb(header, unicode_errors="surrogatepass"), *frames], max_bytes=LIMIT)


@many
@given(message=samples.messages, data=st.data())
def test_a_flipped_byte_gives_a_valid_message_or_a_frame_error(message, data):
    payload = bytearray(to_payload(message))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    try:
        mutated = from_payload(payload)
    except FrameError:
        return
    assert_equal(decode(encode(mutated), max_bytes=LIMIT), mutated)


@many
@given(message=samples.messages, data=st.data())
def test_a_header_with_one_part_replaced_gives_a_valid_message_or_a_frame_error(message, data):
    header, *arrays = encode(message)
    parts = msgpack.unpackb(header, unicode_errors="surrogatepass")
    section = parts[data.draw(st.sampled_from([2, 3]))]
    section[data.draw(st.integers(0, len(section) - 1))] = data.draw(samples.plain_values)
    try:
        mutated = decode([msgpack.packb(parts, unicode_errors="surrogatepass"), *arrays], max_bytes=LIMIT)
    except FrameError:
        return
    assert_equal(decode(encode(mutated), max_bytes=LIMIT), mutated)


@many
@given(message=samples.messages, data=st.data())
def test_every_truncation_is_refused(message, data):
    frames = encode(message)
    payload = to_payload(message)
    with pytest.raises(FrameError):
        from_payload(payload[: data.draw(st.integers(0, len(payload) - 1))])
    with pytest.raises(TruncatedFrame):
        decode(frames[: data.draw(st.integers(0, len(frames) - 1))], max_bytes=LIMIT)


def test_more_bytes_than_admitted_are_refused():
    frames = encode(samples.trajectory())
    size = sum(map(len, frames))
    decode(frames, max_bytes=size)
    with pytest.raises(OversizedFrame):
        decode(frames, max_bytes=size - 1)


def test_an_unknown_tag_and_an_unknown_schema_are_named():
    header, *arrays = encode(samples.trajectory())
    tag, schema, *rest = msgpack.unpackb(header)
    with pytest.raises(UnknownTag, match="trajektory"):
        decode([msgpack.packb(["trajektory", schema, *rest]), *arrays], max_bytes=LIMIT)
    with pytest.raises(UnknownSchema, match="99"):
        decode([msgpack.packb([tag, 99, *rest]), *arrays], max_bytes=LIMIT)


def test_the_member_after_the_last_sample_is_the_greedy_response_and_there_is_no_further_one():
    greedy = samples.trajectory(member=8, group_size=8)
    assert greedy.is_greedy
    assert from_payload(to_payload(greedy)).is_greedy
    with pytest.raises(MalformedFrame, match="at most group_size 8, which is the greedy response"):
        encode(samples.trajectory(member=9, group_size=8))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"log_probs": np.zeros(7, dtype=np.float32)}, "equally long"),
        ({"log_probs": np.zeros(8, dtype=np.float64)}, "float64"),
        ({"versions": np.zeros((8, 1), dtype=np.int32)}, "one-dimensional"),
        ({"finish_reason": "bored"}, "finish_reason"),
        ({"failure": "server lost"}, "no response tokens"),
        ({"extra_info": {"when": {1, 2}}}, "plain values"),
        ({"ground_truth": np.float64(1)}, "plain values"),
        ({"ground_truth": 2**70}, "cannot travel"),
        ({"group_size": 0}, "group_size is at least 1"),
        ({"log_probs": np.zeros(8, dtype=">f4")}, "one-dimensional"),
        ({"generate_seconds": float("nan")}, "duration"),
        ({"versions": [0] * 8}, "cannot travel"),
        ({"loss_mask": np.ones(8, dtype=np.uint8)}, "uint8"),
        ({"prompt_tokens": np.zeros((), dtype=np.int32)}, "one-dimensional"),
    ],
)
def test_a_trajectory_that_breaks_a_rule_is_refused_when_it_is_sent(change, rule):
    with pytest.raises(MalformedFrame, match=rule) as caught:
        encode(dataclasses.replace(samples.trajectory(row=7, num_tokens=8), **change))
    assert "0/7/0/0" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"lengths": np.array([3, 6], dtype=np.int32)}, "as long as the lengths say"),
        ({"lengths": np.array([9, -1], dtype=np.int32)}, "length of at least 0"),
        ({"members": np.array([1, 0], dtype=np.int32)}, "ascend"),
        ({"members": np.array([0, 2], dtype=np.int32)}, "below group_size"),
        ({"greedy": GreedyResponse(float("nan"), 0, 0)}, "greedy is a finite reward"),
        ({"teacher_log_probs": np.zeros(3, dtype=np.float32)}, "a teacher judges every token or none"),
        ({"greedy": GreedyResponse(1.0, -1, 0)}, "greedy is a finite reward"),
        ({"rewards": np.ones(3, dtype=np.float32)}, "one value per member"),
        ({"rewards": np.array([1, np.nan], dtype=np.float32)}, "has its failure"),
        ({"responses": ["3"]}, "one per member"),
        ({"metrics": {"length": "long"}}, "numbers by name"),
    ],
)
def test_a_group_that_breaks_a_rule_is_refused_when_it_is_sent(change, rule):
    with pytest.raises(MalformedFrame, match=rule):
        encode(dataclasses.replace(samples.scored_group(lengths=(3, 5)), **change))


def test_decoded_arrays_are_aligned_read_only_views_of_the_payload():
    message = from_payload(to_payload(samples.trajectory(num_tokens=5)))
    assert isinstance(message, Trajectory)
    assert message.log_probs.flags.aligned
    assert not message.log_probs.flags.writeable
    assert not message.log_probs.flags.owndata


def test_arrays_that_are_not_contiguous_travel():
    every_second = np.arange(16, dtype=np.int32)[::2]
    message = dataclasses.replace(samples.trajectory(num_tokens=8), response_tokens=every_second)
    assert_equal(from_payload(to_payload(message)), message)
    assert_equal(decode(encode(message), max_bytes=LIMIT), message)


@many
@given(message=samples.messages, offset=st.sampled_from([0, 8, 16]))
def test_a_payload_may_lie_anywhere_in_a_larger_block(message, offset):
    payload = to_payload(message)
    block = memoryview(bytes(offset) + payload + b"more....")
    assert_equal(from_payload(block[offset : offset + len(payload)]), message)


def test_the_envelope_names_message_and_group():
    assert envelope(samples.trajectory(row=4, member=2)) == ("0/4/0/2", "0/4/0")
    assert envelope(samples.scored_group(row=4)) == ("0/4/0", "0/4/0")
