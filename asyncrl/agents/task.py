"""What an agent is asked for, and the trajectory of a member that could not be generated."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.messages import GroupId, Trajectory
from asyncrl.protocols import Prompt, SamplingParams

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0


@dataclass(slots=True)
class Task:
    """Members wanted of one group. prompt_tokens int32[P]; `run_seed` with a member's id gives that member's seed;
    `max_response_tokens` bounds all turns of a conversation together; `rid_prefix` keeps an evaluation's request ids apart."""

    id: GroupId
    group_size: int
    members: tuple[int, ...]
    start_version: int
    prompt: Prompt
    prompt_tokens: npt.NDArray[np.int32]
    sampling: SamplingParams
    max_response_tokens: int
    run_seed: int
    timeout_seconds: float
    retries: int
    rid_prefix: str = ""


class Agent(Protocol):
    """Makes trajectories of members."""

    active: set[str]
    """Ids of the requests that the servers work on, for an abort."""

    def run(self, task: Task) -> AsyncGenerator[Sequence[Trajectory], None]:
        """Yield exactly one trajectory per member, each as soon as it is finished, together with those that finished at the same
        moment; one that could not be made has `failure`."""


def seed_of(run_seed: int, *path: int | str) -> int:
    """A seed in [0, 2^63) that depends on all of `path`: epoch, row, attempt, member, and the turn of a conversation."""
    text = "/".join(map(str, (run_seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeds_of(run_seed: int, group: GroupId, members: Sequence[int]) -> list[int]:
    """`seed_of(run_seed, *group, member)` of each. What stands before the member is hashed once."""
    group_hash = hashlib.blake2b(f"{run_seed}/{group}/".encode(), digest_size=8)
    seeds = []
    for member in members:
        member_hash = group_hash.copy()
        member_hash.update(str(member).encode())
        seeds.append(int.from_bytes(member_hash.digest(), "big") >> 1)
    return seeds


def failed_trajectory(task: Task, member: int, failure: str) -> Trajectory:
    """The trajectory of a member that has no response, so that its group closes all the same."""
    return Trajectory(
        id=task.id.member(member),
        group_size=task.group_size,
        start_version=task.start_version,
        prompt_tokens=task.prompt_tokens,
        response_tokens=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.bool_),
        log_probs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        finish_reason="failed",
        prompt=task.prompt.prompt,
        response="",
        ground_truth=task.prompt.ground_truth,
        extra_info=task.prompt.extra_info,
        failure=failure,
    )


async def pause_before_retry(tried: int) -> None:
    """0.05 s before the first retry, twice as long before each further one: time for a lost server to be replaced."""
    await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (tried - 1)))
