"""The agent `single_turn`: one response per member, the whole group in one request."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.agents.task import Task, failed_trajectory, pause_before_retry, seeds_of
from asyncrl.errors import AsyncrlError
from asyncrl.messages import Trajectory, TrajectoryId
from asyncrl.protocols import Completion, GenerateRequest, InferenceEngine, MemberRequest, Tokenizer
from asyncrl.protocols.inference import failed_completion

NO_ANSWER = "the inference server ended the request without an answer for this member"


class SingleTurn:
    """See `Agent`. Members that failed are asked for again together, `task.retries` times."""

    def __init__(self, engine: InferenceEngine, tokenizer: Tokenizer, now: Callable[[], float] = time.monotonic):
        self._engine, self._tokenizer, self._now = engine, tokenizer, now
        self.active: set[str] = set()

    async def run(self, task: Task) -> AsyncGenerator[list[Trajectory], None]:
        began = self._now()
        failures = dict.fromkeys(task.members, NO_ANSWER)
        for tried in range(task.retries + 1):
            if tried:
                await pause_before_retry(tried)
            async for completions in self._ask(task, tuple(failures), tried):
                answered = []
                for completion in completions:
                    if completion.failure is not None:
                        failures[completion.index] = completion.failure
                    elif failures.pop(completion.index, None) is not None:
                        answered.append(completion)
                if answered:
                    yield self._trajectories(task, answered, self._now() - began)
            if not failures:
                return
        tries = f"generation failed {task.retries + 1} times"
        yield [failed_trajectory(task, member, f"{tries}: {failure}") for member, failure in failures.items()]

    async def _ask(self, task: Task, members: tuple[int, ...], tried: int) -> AsyncIterator[Sequence[Completion]]:
        group, suffix = f"{task.rid_prefix}{task.id}", f":{tried}" if tried else ""
        rids = [f"{group}/{member}{suffix}" for member in members]
        wanted = tuple(map(MemberRequest, members, rids, seeds_of(task.run_seed, task.id, members)))
        self.active.update(rids)
        try:
            request = GenerateRequest(task.prompt_tokens, wanted, task.sampling, task.timeout_seconds)
            async for completions in self._engine.generate(request):
                yield completions
        except AsyncrlError as error:  # the engine as a whole is out of reach: the same as a failure of every member left
            yield [failed_completion(member, "", f"{type(error).__name__}: {error}") for member in members]
        finally:
            self.active.difference_update(rids)

    def _trajectories(self, task: Task, answered: Sequence[Completion], seconds: float) -> list[Trajectory]:
        prompt = task.prompt
        shared = {
            "group_size": task.group_size,
            "start_version": task.start_version,
            "prompt_tokens": task.prompt_tokens,
            "prompt": prompt.prompt,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "generate_seconds": seconds,
            "failure": None,
        }
        return [
            _filled(
                {
                    **shared,
                    "id": TrajectoryId(*task.id, completion.index),
                    "response_tokens": completion.token_ids,
                    "loss_mask": _all_true(len(completion.token_ids)),
                    "log_probs": completion.log_probs,
                    "versions": completion.versions,
                    "finish_reason": completion.finish_reason,
                    "response": self._tokenizer.decode(completion.token_ids.tolist()),
                    "messages": [],
                    "tool_calls": [],
                }
            )
            for completion in answered
        ]


def _filled(values: dict[str, Any]) -> Trajectory:
    """A trajectory of all its fields, set at once: its own `__init__` sets them one by one, at three times the cost."""
    trajectory = object.__new__(Trajectory)
    object.__setattr__(trajectory, "__dict__", values)
    return trajectory


@functools.lru_cache(maxsize=256)
def _all_true(length: int) -> npt.NDArray[np.bool_]:
    """One for all responses of this length; read-only."""
    mask = np.ones(length, np.bool_)
    mask.flags.writeable = False
    return mask
