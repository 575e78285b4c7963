"""Payloads travel in blocks: a block is a frame with payloads end to end, small enough that one payload may keep it in memory.

    sender ──gathered──▶ blocks ──▶ broker: cut, each payload a view of its block ──forwarded──▶ blocks ──▶ receiver: cut

A frame each would cost more than a copy, and a copy at every hop more than a block that goes on as it came. A block of several
payloads has at most BLOCK_BYTES; it is freed with the last of its payloads, so what stays of it is bounded by that for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import zmq

from asyncrl.errors import MalformedFrame, OversizedFrame, TruncatedFrame

BLOCK_BYTES = 128 * 1024  # most of a block of several payloads
WHOLE_BYTES = 32 * 1024  # a block as large goes on as it came; smaller ones are gathered

Block = bytes | zmq.Frame
Payload = bytes | memoryview  # a memoryview of a block
Sizes = list[list[int]]  # bytes of the payloads, block by block


class Blocks(NamedTuple):
    """Payloads in order, ready to be sent."""

    sizes: Sizes
    frames: list[Block | Payload]


def gathered(payloads: Sequence[Payload]) -> Blocks:
    """These payloads copied into blocks; one that fills a block is a block of its own, not copied."""
    blocks = Blocks([], [])
    _gather(blocks, payloads)
    return blocks


def forwarded(payloads: Sequence[Payload]) -> Blocks:
    """As `gathered`, but a large block whose payloads (as `cut` made them) are all here, in its order, goes on as it came."""
    if sum(map(len, payloads)) < WHOLE_BYTES:
        return gathered(payloads)
    blocks = Blocks([], [])
    loose: list[Payload] = []
    for _, run in groupby(payloads, key=lambda payload: id(_block(payload))):
        parts = list(run)
        sizes = list(map(len, parts))
        size = sum(sizes)
        block = _block(parts[0])
        if size >= WHOLE_BYTES and size == len(block):
            _gather(blocks, loose)
            loose.clear()
            blocks.sizes.append(sizes)
            blocks.frames.append(block)
        else:
            loose += parts
    _gather(blocks, loose)
    return blocks


def cut(sizes: Sizes, frames: Sequence[Block]) -> list[memoryview]:
    """The payloads of these blocks, views of them. Raises a FrameError when sizes and frames do not belong together."""
    if len(sizes) != len(frames):
        raise MalformedFrame(f"sizes of {len(sizes)} blocks are listed, {len(frames)} came")
    payloads: list[memoryview] = []
    for of_block, frame in zip(sizes, frames, strict=True):
        if sum(of_block) != len(frame):
            raise TruncatedFrame(f"a block of {sum(of_block)} bytes is announced, {len(frame)} came")
        if len(frame) > BLOCK_BYTES and len(of_block) > 1:
            raise OversizedFrame(f"a block of several payloads has at most {BLOCK_BYTES} bytes, found {len(frame)}")
        view = frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)
        payloads += [view[end - size : end] for size, end in zip(of_block, accumulate(of_block), strict=True)]
    return payloads


def _block(payload: Payload) -> Block:
    """The frame that holds it."""
    block = payload.obj if type(payload) is memoryview else payload
    assert isinstance(block, (bytes, zmq.Frame)), "a payload is bytes, or a view of the frame in which it came"
    return block


def _gather(blocks: Blocks, payloads: Sequence[Payload]) -> None:
    first = size = 0
    sizes = list(map(len, payloads))
    for number, more in enumerate(sizes):
        if size + more > BLOCK_BYTES and number > first:
            _add(blocks, payloads[first:number], sizes[first:number])
            first, size = number, 0
        size += more
    if payloads:
        _add(blocks, payloads[first:], sizes[first:])


def _add(blocks: Blocks, payloads: Sequence[Payload], sizes: list[int]) -> None:
    blocks.sizes.append(sizes)
    blocks.frames.append(payloads[0] if len(payloads) == 1 else b"".join(payloads))
