"""Evaluation: responses to held-out prompts, scored by the Reward service. It touches neither ledger nor admission.

    prompts in turn ──▶ (places that rollouts leave free) ──▶ agent ──▶ Reward `score` ──▶ record, metrics on the axis "eval"

Seeds depend on run seed, prompt and sample alone, so that every evaluation of a run asks the same questions with the same dice.
What took place in an earlier life of the rollouter is in `history`: the first happens once per run, the others where due.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.agents import Task, seed_of
from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncrlError
from asyncrl.messages import GroupId, Trajectory
from asyncrl.protocols import Prompt, SamplingParams
from asyncrl.rewards import item_of
from asyncrl.scheduling.admission import parts_of_group
from asyncrl.services.rollouter.generation import Places
from asyncrl.services.rollouter.history import EvalHistory, EvalRecord, Occasion
from asyncrl.services.rollouter.parts import RollouterParts
from asyncrl.services.rollouter.pulse import Pulse

log = logging.getLogger(__name__)

SCORED_AT_ONCE = 64
LOOK_AGAIN_SECONDS = 1.0
WARN_SECONDS = 60.0
CONFIRM_TIMEOUTS = 2  # the last version is waited for by so many times sync.timeout_seconds
RID_PREFIX = "eval"
SOURCE_FIELD = "data_source"  # of a row that names where it comes from
EVAL_EPOCH = -1  # in ids of evaluation, which never reach the ledger


def is_evaluation(rid: str) -> bool:
    """Whether a request id is one of an evaluation's."""
    return rid.startswith(RID_PREFIX)


def samples_in_turn(num_prompts: int, samples: int) -> list[int]:
    """How many responses each prompt is asked for: their sum is `samples`, no two differ by more than one, the first have
    more."""
    least, more = divmod(samples, num_prompts)
    return [least + (index < more) for index in range(num_prompts)]


class Evaluator:
    """Runs evaluations, one at a time. `room()`: places that no rollout waits for; `confirmed()`: the version that every server
    taking traffic has confirmed; `behind(version)`: servers that have not confirmed it, those without traffic included."""

    def __init__(
        self,
        config: Config,
        parts: RollouterParts,
        *,
        places: Places,
        room: Callable[[], int],
        confirmed: Callable[[], int | None],
        behind: Callable[[int], list[str]],
        finished_steps: Callable[[], int],
        pulse: Pulse,
        clock: Clock,
    ):
        self._config, self._parts = config, parts
        self._places, self._room, self._confirmed, self._behind = places, room, confirmed, behind
        self._finished_steps = finished_steps
        self._pulse, self._clock = pulse, clock
        self._one_at_a_time = asyncio.Lock()
        self._number = 0
        self._tokens: dict[int, npt.NDArray[np.int32]] = {}
        self.history = EvalHistory(parts.run_dir)

    async def evaluate_first(self) -> None:
        """Unless it took place in an earlier life, or steps are finished: then it cannot any more."""
        if self.history.newest("first") is None and not self._finished_steps():
            await self._evaluate("first")

    async def run_schedule(self, over: Callable[[], bool]) -> None:
        """Every eval.every steps, until `over()`; a step that passes while one is running is not made up for."""
        every, steps = self._config.eval.every, self._config.training.steps
        due = (self.history.last_step // every + 1) * every
        while not over():
            finished = self._finished_steps()
            if due <= finished < steps:
                due = (finished // every + 1) * every
                await self._evaluate("scheduled")
            else:
                await self._pulse.wait(LOOK_AGAIN_SECONDS)

    async def evaluate_last(self, final_version: int | None) -> None:
        """Once every server has confirmed the last version. By a deadline it goes to those that have, if all that take traffic
        are among them; else there is none. One of an earlier life, of this version, stands."""
        last = self.history.newest("last")
        if last is not None and (last.step, last.version_min) == (self._finished_steps(), final_version):
            return
        deadline = CONFIRM_TIMEOUTS * self._config.sync.timeout_seconds
        ends = self._clock.now() + deadline
        while final_version is not None and (behind := self._behind(final_version)):
            if self._clock.now() >= ends:
                names, confirmed = ", ".join(behind), self._confirmed()
                if confirmed is None or confirmed < final_version:
                    log.error("no last evaluation: after %.0f s %s had not confirmed version %d", deadline, names, final_version)
                    return
                log.warning("the last evaluation leaves out %s: not at version %d after %.0f s", names, final_version, deadline)
                break
            await self._pulse.wait(LOOK_AGAIN_SECONDS)
        await self._evaluate("last")

    async def _evaluate(self, occasion: Occasion) -> None:
        """By a deadline: what is finished then is scored. Never raises for a failed sample, server or reward; an evaluation
        without a scored sample is an error in the log."""
        async with self._one_at_a_time:
            await self._evaluate_now(occasion, self._finished_steps())

    async def _evaluate_now(self, occasion: Occasion, step: int) -> None:
        rounds = 1 + math.ceil(self._config.eval.samples / self._places.total)
        deadline_seconds = rounds * self._config.rollout.request_timeout_seconds
        began = self._clock.now()
        self._number += 1
        finished: list[Trajectory] = []
        failures: list[str] = []
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._generate(finished)
        except TimeoutError:
            failures.append(f"not all responses were there after {deadline_seconds:.0f} s")
        failures += [trajectory.failure for trajectory in finished if trajectory.failure is not None]
        generated = [trajectory for trajectory in finished if trajectory.failure is None]
        scored = await self._score(generated, failures)
        record = _record(occasion, step, generated, scored, self._config.eval.samples, self._clock.now() - began)
        self.history.add(record)
        self._report(record, failures)

    async def _generate(self, finished: list[Trajectory]) -> None:
        """Append every response to `finished` as it comes."""
        prompts = self._parts.eval_prompts[: self._config.eval.samples]
        async with asyncio.TaskGroup() as requests:
            for index, samples in enumerate(samples_in_turn(len(prompts), self._config.eval.samples)):
                for members in parts_of_group(samples, self._places.total):
                    await self._wait_for_room(len(members))
                    self._places.take(len(members))
                    requests.create_task(self._ask(index, prompts[index], tuple(members), samples, finished))

    async def _wait_for_room(self, places: int) -> None:
        warn_at = self._clock.now() + WARN_SECONDS
        while self._room() < places:
            await self._pulse.wait(LOOK_AGAIN_SECONDS)
            if self._clock.now() >= warn_at:
                rollout, training = self._config.rollout, self._config.training
                groups = (rollout.staleness_limit + 1) * training.publish_every * training.groups_per_step
                log.warning(
                    "an evaluation has waited %.0f s for places that rollouts leave free: rollout.max_concurrent is %d and "
                    "rollouts may want %d, raise it above that",
                    WARN_SECONDS,
                    rollout.max_concurrent,
                    groups * self._config.members_per_group,
                )
                warn_at = float("inf")

    async def _ask(self, index: int, prompt: Prompt, members: tuple[int, ...], samples: int, finished: list[Trajectory]) -> None:
        left = len(members)
        try:
            async with aclosing(self._parts.agent.run(self._task(index, prompt, members, samples))) as answers:
                async for trajectories in answers:
                    finished += trajectories
                    left -= len(trajectories)
                    self._places.give(len(trajectories))
        finally:
            self._places.give(left)

    def _task(self, index: int, prompt: Prompt, members: tuple[int, ...], samples: int) -> Task:
        rollout = self._config.rollout
        if index not in self._tokens:
            self._tokens[index] = np.asarray(self._parts.tokenizer.encode_prompt(prompt.prompt), np.int32)
        return Task(
            id=GroupId(EVAL_EPOCH, prompt.row, 0),
            group_size=samples,
            members=members,
            start_version=0,
            prompt=prompt,
            prompt_tokens=self._tokens[index],
            sampling=SamplingParams(
                max_new_tokens=prompt.sampling.get("max_new_tokens", rollout.max_response_tokens),
                temperature=self._config.eval.temperature,
                ignore_eos=prompt.sampling.get("ignore_eos", False),
            ),
            max_response_tokens=rollout.max_response_tokens,
            run_seed=seed_of(self._config.seed, "eval"),
            timeout_seconds=rollout.request_timeout_seconds,
            retries=rollout.generation_retries,
            rid_prefix=f"{RID_PREFIX}{self._number}:",
        )

    async def _score(self, generated: Sequence[Trajectory], failures: list[str]) -> list[tuple[Trajectory, float]]:
        reward = self._config.reward
        scored: list[tuple[Trajectory, float]] = []
        for first in range(0, len(generated), SCORED_AT_ONCE):
            chunk = generated[first : first + SCORED_AT_ONCE]
            timeout = reward.timeout_seconds * (len(chunk) + 1)
            try:
                answers = await self._parts.scorer.score([item_of(trajectory) for trajectory in chunk], timeout)
            except AsyncrlError as error:
                failures.append(f"scoring: {type(error).__name__}: {error}")
                continue
            for trajectory, answer in zip(chunk, answers, strict=True):
                if answer.get("score") is not None:
                    scored.append((trajectory, float(answer["score"])))
                else:
                    failures.append(str(answer.get("failure") or "no score"))
        return scored

    def _report(self, record: EvalRecord, failures: Sequence[str]) -> None:
        if record.score is None:
            log.error("the evaluation after step %d scored no sample: %s", record.step, failures[0] if failures else "no sample")
        else:
            log.info("evaluation after step %d: %.4f over %d samples", record.step, record.score, record.samples)
            if failures:
                log.warning("%d samples of that evaluation failed, the first because: %s", record.failed, failures[0])
        figures: dict[str, Any] = {key: value for key, value in asdict(record).items() if isinstance(value, int | float)}
        del figures["step"]
        figures |= {f"score/{_clean(source)}": part["score"] for source, part in record.by_source.items()}
        self._parts.tracker.log("eval", record.step, {f"eval/{key}": float(value) for key, value in figures.items()})


def _record(
    occasion: Occasion,
    step: int,
    generated: Sequence[Trajectory],
    scored: Sequence[tuple[Trajectory, float]],
    wanted: int,
    seconds: float,
) -> EvalRecord:
    versions = [trajectory.versions[trajectory.loss_mask] for trajectory in generated if trajectory.loss_mask.any()]
    tokens = sum(len(trajectory.response_tokens) for trajectory in generated)
    by_source: dict[str, list[float]] = {}
    for trajectory, score in scored:
        if isinstance(source := trajectory.extra_info.get(SOURCE_FIELD), str):
            by_source.setdefault(source, []).append(score)
    return EvalRecord(
        occasion=occasion,
        step=step,
        score=_mean([score for _, score in scored]),
        samples=len(scored),
        failed=wanted - len(scored),
        version_min=min((int(part.min()) for part in versions), default=None),
        version_max=max((int(part.max()) for part in versions), default=None),
        response_tokens_mean=tokens / len(generated) if generated else 0.0,
        seconds=seconds,
        by_source={source: {"score": _mean(scores), "samples": len(scores)} for source, scores in sorted(by_source.items())},
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _clean(source: str) -> str:
    """As a part of a metric's name, which not every tracker lets hold everything."""
    return re.sub(r"[^\w\-. ]", "_", source)
