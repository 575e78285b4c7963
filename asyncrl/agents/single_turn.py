"""The agent `single_turn`: one response per member, the whole group in one request."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np
import numpy.typing as npt

from asyncrl.agents.task import Task, failed_trajectory, pause_before_retry, seed_of
from asyncrl.errors import AsyncrlError
from asyncrl.messages import Trajectory
from asyncrl.protocols import Completion, GenerateRequest, InferenceEngine, MemberRequest, Tokenizer
from asyncrl.protocols.inference import failed_completion

NO_ANSWER = "the inference server ended the request without an answer for this member"


class SingleTurn:
    """See `Agent`. Members that failed are asked for again together, `task.retries` times."""

    def __init__(self, engine: InferenceEngine, tokenizer: Tokenizer, now: Callable[[], float] = time.monotonic):
        self._engine, self._tokenizer, self._now = engine, tokenizer, now
        self.active: set[str] = set()

    async def run(self, task: Task) -> AsyncGenerator[Trajectory, None]:
        began = self._now()
        failures = dict.fromkeys(task.members, NO_ANSWER)
        for tried in range(task.retries + 1):
            if tried:
                await pause_before_retry(tried)
            async for completion in self._ask(task, tuple(failures), tried):
                if completion.failure is not None:
                    failures[completion.index] = completion.failure
                elif failures.pop(completion.index, None) is not None:
                    yield self._trajectory(task, completion, self._now() - began)
            if not failures:
                return
        for member, failure in failures.items():
            yield failed_trajectory(task, member, f"generation failed {task.retries + 1} times: {failure}")

    async def _ask(self, task: Task, members: tuple[int, ...], tried: int) -> AsyncIterator[Completion]:
        suffix = f":{tried}" if tried else ""
        wanted = tuple(
            MemberRequest(member, f"{task.rid_prefix}{task.id}/{member}{suffix}", seed_of(task.run_seed, *task.id, member))
            for member in members
        )
        rids = [member.rid for member in wanted]
        self.active.update(rids)
        try:
            request = GenerateRequest(task.prompt_tokens, wanted, task.sampling, task.timeout_seconds)
            async for completion in self._engine.generate(request):
                yield completion
        except AsyncrlError as error:  # the engine as a whole is out of reach: the same as a failure of every member left
            for member in members:
                yield failed_completion(member, "", f"{type(error).__name__}: {error}")
        finally:
            self.active.difference_update(rids)

    def _trajectory(self, task: Task, completion: Completion, seconds: float) -> Trajectory:
        prompt = task.prompt
        return Trajectory(
            id=task.id.member(completion.index),
            group_size=task.group_size,
            start_version=task.start_version,
            prompt_tokens=task.prompt_tokens,
            response_tokens=completion.token_ids,
            loss_mask=_all_true(len(completion.token_ids)),
            log_probs=completion.log_probs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            prompt=prompt.prompt,
            response=self._tokenizer.decode(completion.token_ids.tolist()),
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            generate_seconds=seconds,
        )


@functools.lru_cache(maxsize=256)
def _all_true(length: int) -> npt.NDArray[np.bool_]:
    """One for all responses of this length; read-only."""
    mask = np.ones(length, np.bool_)
    mask.flags.writeable = False
    return mask
