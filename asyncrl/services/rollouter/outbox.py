"""The outbox: finished trajectories on their way into the queue. Everything that is finished goes out in one send."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from asyncrl.clock import IdleMeter
from asyncrl.errors import MessageTooLarge, StreamClosed
from asyncrl.messages import Trajectory
from asyncrl.protocols import Sender

log = logging.getLogger(__name__)


class Outbox:
    """`leaving()` is called before anything leaves, `accepted(trajectories)` is told what the queue has taken in. Its size is
    bounded by the admitted groups, whose members each stand here at most once; time spent in a send counts as waiting for
    ``rollouts``.

    A rollouter that takes a lost one's place may find the stream ended: then nothing more is wanted, and training is about to
    be over. What is here goes nowhere; its groups end with training.
    """

    def __init__(
        self,
        sender: Sender,
        accepted: Callable[[Sequence[Trajectory]], None],
        blocked: IdleMeter,
        *,
        leaving: Callable[[], None] = lambda: None,
    ):
        self._sender, self._accepted, self._blocked, self._leaving = sender, accepted, blocked, leaving
        self._waiting: list[Trajectory] = []
        self._filled = asyncio.Event()
        self.closed = False
        self._has_sent = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        self._waiting += trajectories
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            batch, self._waiting = self._waiting, []
            self._filled.clear()
            self._leaving()
            try:
                with self._blocked.waiting("rollouts"):
                    await self._send(batch)
            except StreamClosed as error:
                if self._has_sent:
                    raise
                log.warning("%d responses have nowhere to go: %s", len(batch), error)
                self.closed = True
                continue
            self._has_sent = True
            self._accepted(batch)

    async def close(self) -> None:
        """End the stream, once."""
        if self.closed:
            return
        self.closed = True
        try:
            await self._sender.close()
        except StreamClosed as error:
            log.info("the stream had ended: %s", error)

    async def _send(self, batch: Sequence[Trajectory]) -> None:
        try:
            await self._sender.send(batch)
        except MessageTooLarge:  # one by one, so that only the large one is lost; second copies are dropped by their ids
            for trajectory in batch:
                await self._send_or_fail(trajectory)

    async def _send_or_fail(self, trajectory: Trajectory) -> None:
        try:
            await self._sender.send([trajectory])
        except MessageTooLarge as error:
            log.warning("%s failed: %s", trajectory.id, error)
            await self._sender.send([_without_response(trajectory, str(error))])


def _without_response(trajectory: Trajectory, failure: str) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        response_tokens=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.bool_),
        log_probs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        finish_reason="failed",
        response="",
        extra_info={},
        messages=[],
        tool_calls=[],
        failure=failure,
    )
