"""Payloads go through blocks unchanged, and a large block that goes on whole is not copied."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import FrameError, MalformedFrame, OversizedFrame, TruncatedFrame
from asyncrl.transport.blocks import BLOCK_BYTES, WHOLE_BYTES, Blocks, cut, forwarded, gathered

sizes = st.integers(1, 200) | st.integers(WHOLE_BYTES - 2, WHOLE_BYTES + 2) | st.integers(BLOCK_BYTES - 2, BLOCK_BYTES + 2)
many = settings(max_examples=100, deadline=None)


@st.composite
def payload_lists(draw: st.DrawFn) -> list[bytes]:
    return [bytes([number % 256]) * size for number, size in enumerate(draw(st.lists(sizes, max_size=12)))]


def assert_bounded(blocks: Blocks) -> None:
    for of_block, frame in zip(blocks.sizes, blocks.frames, strict=True):
        assert sum(of_block) == len(frame)
        assert len(of_block) == 1 or len(frame) <= BLOCK_BYTES


def received(blocks: Blocks, *, as_frames: bool) -> list[memoryview]:
    return cut(blocks.sizes, [zmq.Frame(bytes(frame)) if as_frames else bytes(frame) for frame in blocks.frames])


@many
@given(payloads=payload_lists(), as_frames=st.booleans(), data=st.data())
def test_payloads_survive_two_hops_whatever_part_of_them_goes_on(payloads, as_frames, data):
    first = gathered(payloads)
    assert_bounded(first)
    at_broker = received(first, as_frames=as_frames)
    assert at_broker == payloads
    goes_on = [payload for payload in at_broker if data.draw(st.booleans(), label="goes on")]
    second = forwarded(goes_on)
    assert_bounded(second)
    assert received(second, as_frames=False) == goes_on


def test_a_large_block_that_goes_on_whole_is_the_one_that_came():
    large, small = [b"x" * 9000] * 8, [b"y" * 100] * 3
    blocks = [gathered(large), gathered(small)]
    frames = [zmq.Frame(bytes(block.frames[0])) for block in blocks]
    payloads = [payload for block, frame in zip(blocks, frames, strict=True) for payload in cut(block.sizes, [frame])]
    on = forwarded(payloads)
    assert on.frames[0] is frames[0]
    assert on.frames[1] == b"y" * 300
    assert forwarded(payloads[1:]).frames[0] == b"x" * 9000 * 7 + b"y" * 300


@pytest.mark.parametrize(
    ("sizes", "frames", "error"),
    [
        ([[1]], [], MalformedFrame),
        ([], [b"x"], MalformedFrame),
        ([[1, 1]], [b"x"], TruncatedFrame),
        ([[1]], [b"xx"], TruncatedFrame),
        ([[1, BLOCK_BYTES]], [bytes(BLOCK_BYTES + 1)], OversizedFrame),
    ],
)
def test_sizes_and_frames_that_do_not_belong_together_are_refused(sizes, frames, error):
    with pytest.raises(error):
        cut(sizes, frames)
    assert issubclass(error, FrameError)
