"""Rank 0: the loop of steps. Its map is in the package's docstring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import CheckpointInfo
from asyncrl.clock import Clock
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.protocols import End, StepOutcome, StepRecord, TrainBatch, TrainingEngine
from asyncrl.scheduling.learning_rate import learning_rate
from asyncrl.scheduling.minibatches import batch_order, cut_minibatches
from asyncrl.scheduling.selection import Candidate, SelectionRules, Selector, narrow, split_filtered
from asyncrl.services.trainer import figures
from asyncrl.services.trainer.bound import StalenessBound
from asyncrl.services.trainer.health import Health
from asyncrl.services.trainer.intake import Intake, Taken
from asyncrl.services.trainer.parts import RunBlocking, TrainerParts
from asyncrl.services.trainer.ranks import Ranks
from asyncrl.services.trainer.records import Records
from asyncrl.services.trainer.saving import Saving
from asyncrl.services.trainer.self_test import self_test
from asyncrl.services.trainer.tally import Tally

log = logging.getLogger(__name__)

NON_FINITE = "non-finite"
CONFIRM_POLL_SECONDS = 0.5
CONFIRM_PAUSE_SECONDS = 0.05


class Leader:
    """Makes `training.steps` steps, or as many as the data gives. After a step: its line in batches.jsonl and metrics.jsonl, then
    its record in the ledger, then, every `publish_every` steps, the new version, then, where one is due, a checkpoint; so a step
    that the ledger has is in the files, and one that a checkpoint has is in the ledger."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        engine: TrainingEngine,
        parts: TrainerParts,
        *,
        clock: Clock,
        run_blocking: RunBlocking,
        stopping: asyncio.Event,
        incarnation: int = 1,
        resume: CheckpointInfo | None = None,
        began_wall: float,
    ):
        """resume: the checkpoint to go on from; its steps are finished steps. began_wall: where the run would have begun, had it
        been launched once."""
        assert parts.leader is not None, "rank 0 is given the leader's parts"
        self._config, self._clock, self._stopping = config, clock, stopping
        self._parts, self._publisher, self._run_blocking = parts.leader, parts.publisher, run_blocking
        self._rules = selection_rules(config)
        self._tally, self._bound = Tally(clock), StalenessBound(config)
        self._incarnation, self._resume = incarnation, resume
        self._ranks = Ranks(engine, parts.publisher, run_blocking)
        self.finished_steps = resume.step if resume else 0
        self._records = Records(run_dir, samples_per_step=config.tracking.samples_per_step, last_step=self.finished_steps)
        self._saving = Saving(
            config.checkpoint,
            run_dir,
            self._ranks,
            parts.leader,
            sync_records=self._records.sync,
            clock=clock,
            run_blocking=run_blocking,
        )
        if resume is not None:
            self._tally.restore(resume.state["tally"])
            self._bound.restore(resume.state["staleness_bound"])
        self._intake = Intake(
            Selector(self._rules),
            parts.leader,
            clock=clock,
            meter=self._tally.meter,
            tick=self._tick,
            stopping=stopping,
            data_timeout_seconds=config.training.data_timeout_seconds,
        )
        self._health = Health()
        self.state = "starting"
        self.version: int | None = None
        self.stop_by: float | None = None
        self._metrics: Mapping[str, float] = {}
        self._in_step: tuple[GroupId, ...] = ()
        self._began_wall = began_wall

    async def lead(self) -> None:
        """Until the last step, the end of the data, or a stop. The other ranks are dismissed whatever happens."""
        reason = "rank 0 failed"
        try:
            await self._saving.begin_run(self._resume)
            if self._resume is None:
                await self._self_test("as loaded")
            await self._publish(self._rules.version(self.finished_steps))
            await self._self_test("after the first version")
            while self.finished_steps < self._config.training.steps:
                taken = await self._next_step()
                if taken is None:
                    break
                await self._step(taken)
                if self.finished_steps % self._rules.publish_every == 0:
                    await self._publish(self._rules.version(self.finished_steps))
                await self._saving.after_step(self.finished_steps, self._metrics, self._resumable)
            if not self._stopping.is_set():
                await self._saving.begin_last(self.finished_steps, self._metrics, self._resumable)
                await self._finish()
            self.state = "saving"
            await self._saving.end_run(
                self.finished_steps, self._metrics, self._resumable, seconds=self._seconds_for_the_last_save()
            )
            reason = ""
        finally:
            self._records.close()
            await self._ranks.dismiss(reason)

    # ---- one step ----------------------------------------------------------------------------------------------

    async def _next_step(self) -> Taken | None:
        self.state = "waiting"
        return await self._intake.next_step(self.finished_steps)

    async def _step(self, taken: Taken) -> None:
        self.state = "training"
        self._tally.begin_step()
        taken = taken.in_order(batch_order(self._config.seed))
        self._in_step = tuple(candidate.id for candidate, _ in taken.groups)
        step, version = self.finished_steps + 1, self._rules.version(self.finished_steps)
        trains, filtered = split_filtered((candidate for candidate, _ in taken.groups), self._rules.filter)
        by_id = {candidate.id: group for candidate, group in taken.groups}
        batch = [narrow(by_id[each.id], version=version, max_staleness=self._rules.max_staleness) for each in trains]
        outcome = await self._train(step, version, batch)
        failed = outcome.bad_updates > 0 and outcome.updates == 0
        trained = [] if failed else batch
        tokens = figures.trained_tokens(trained, version)
        ages = figures.StepsOfAge.at(self.finished_steps, self._rules.publish_every)
        metrics = {
            **figures.reward_metrics([group for _, group in taken.groups]),
            **figures.greedy_metrics([group for _, group in taken.groups], version),
            **figures.teacher_metrics([group for _, group in taken.groups]),
            **figures.response_metrics([group for _, group in taken.groups]),
            **figures.staleness_metrics(tokens, ages),
            "staleness/bound": float(self._bound.now),
            **figures.drop_bias(figures.Measure.of([group for _, group in taken.groups]), taken.expired),
            **outcome.metrics,
            **self._group_metrics(taken, len(batch), len(filtered), failed),
            **self._tally.end_step(outcome, tokens),
            "learning_rate": self._learning_rate(step),
            **self._publisher.latest(),
            **self._saving.metrics(),
        }
        self._records.samples(step, trained, [group for _, group in taken.groups])
        self._records.batch(step, version, trained, tokens)
        self._records.metrics(step, version, metrics)
        self._bound.after_step(step, metrics)
        await self._record_step(step, version, trains, filtered, failed)
        self._parts.tracker.log("trainer", step, {"step": float(step), "version": float(version), **metrics})
        log.info("step %d: %d of %d groups trained at version %d", step, len(trained), len(taken.groups), version)
        self._tally.add(tokens, ages, metrics.get("reward/mean"), failed=failed)
        self._metrics = metrics
        self._health.judge(step, metrics)
        self._check_bad_steps(outcome, failed)

    async def _train(self, step: int, version: int, groups: Sequence[ScoredGroup]) -> StepOutcome:
        if not groups:
            return StepOutcome(updates=0, bad_updates=0)
        training = self._config.training
        cuts = cut_minibatches(len(groups), training.mini_batches)
        batch = TrainBatch(step, version, self._learning_rate(step), tuple(groups), cuts, training.epochs_per_batch)
        return await self._ranks.train(batch)

    async def _record_step(
        self, step: int, version: int, trains: Sequence[Candidate], filtered: Sequence[tuple[Candidate, str]], failed: bool
    ) -> None:
        ends = [End(each.id, "failed", NON_FINITE) if failed else End(each.id, "trained") for each in trains]
        ends += [End(each.id, "filtered", reason) for each, reason in filtered]
        with self._tally.meter.waiting("ledger"):
            await self._parts.ledger.finish_step(StepRecord(step, version, tuple(ends), self._bound.to_tell))
        self.finished_steps = step
        self._in_step = ()

    def _check_bad_steps(self, outcome: StepOutcome, failed: bool) -> None:
        """A step that had nothing to train neither adds to the row nor ends it."""
        if failed or outcome.updates:
            self._tally.bad_in_a_row = self._tally.bad_in_a_row + 1 if failed else 0
        limit = self._config.training.max_bad_steps
        if self._tally.bad_in_a_row >= limit:
            raise RunError(
                f"{limit} steps in a row had no finite loss or gradient (training.max_bad_steps): lower training.learning_rate, "
                f"or look at the rewards and log-probs of step {self.finished_steps} in samples.jsonl and metrics.jsonl"
            )

    # ---- versions, and the end ---------------------------------------------------------------------------------

    async def _publish(self, version: int) -> None:
        self.state = "publishing"
        began = self._clock.now()
        with self._tally.meter.waiting("weight sync"):
            await self._ranks.publish(version)
        self._tally.publish_seconds = self._clock.now() - began
        self.version = version

    async def _self_test(self, when: str) -> None:
        """Nothing is trained on what servers say before it is known that they compute what the trainer does."""
        if self._parts.probes is None:
            return
        self.state = "self-test"
        if self.version is not None and not await self._wait_confirmed(self.version):
            raise RunError(
                f"version {self.version} was not confirmed by every server within {2 * self._config.sync.timeout_seconds:g} s "
                "(sync.timeout_seconds): parameter_sync's log says why"
            )
        figures = await self_test(
            self._ranks,
            await self._parts.probes(),
            when=when,
            dtype=self._config.model.dtype,
            temperature=self._config.rollout.temperature,
        )
        self._parts.tracker.log("self_test", self.finished_steps, figures)

    async def _wait_confirmed(self, version: int) -> bool:
        """Until every server has confirmed it; False past twice sync.timeout_seconds, or when the run is to stop."""
        deadline = self._clock.now() + 2 * self._config.sync.timeout_seconds
        while not await self._run_blocking(self._publisher.wait_confirmed, version, CONFIRM_POLL_SECONDS):
            await self._tick()
            await asyncio.sleep(CONFIRM_PAUSE_SECONDS)
            if self._stopping.is_set() or self._clock.now() > deadline:
                return False
        return True

    async def _finish(self) -> None:
        """No further step: say so, and keep the last version where servers can read it until they have."""
        assert self.version is not None, "a version is published first"
        self.state = "finishing"
        await self._parts.ledger.finish_training(self.version)
        if not await self._wait_confirmed(self.version):
            log.warning("version %d was not confirmed by every server before the trainer ended", self.version)

    async def _tick(self) -> None:
        """While the leader waits: a sign of life, and a look at the checkpoint under way."""
        await self._ranks.tick()
        await self._saving.look()

    def _seconds_for_the_last_save(self) -> float:
        """checkpoint.timeout_seconds; after a stop, what its giver left, or cluster.stop_grace_seconds."""
        if not self._stopping.is_set():
            return self._config.checkpoint.timeout_seconds
        if self.stop_by is None:
            return self._config.cluster.stop_grace_seconds
        return max(0.0, self.stop_by - self._clock.now())

    def _resumable(self) -> dict[str, Any]:
        """state.json of a checkpoint taken now, but for `format`, `best` and `files`."""
        return {
            "step": self.finished_steps,
            "version": self._rules.version(self.finished_steps),
            "incarnation": self._incarnation,
            "world_size": self._ranks.world_size,
            "wall_s": round(self._clock.wall() - self._began_wall, 3),
            "config": self._config.to_mapping(),
            "tally": self._tally.state(),
            "staleness_bound": self._bound.state(),
        }

    def held(self) -> list[GroupId]:
        """Scored groups in the trainer's hands: waiting to be picked, or in the step that is being made."""
        return [*self._intake.held(), *self._in_step]

    # ---- figures -----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "version": self.version,
            "step": self.finished_steps,
            "staleness_bound": self._bound.now,
            "bad_steps": self._tally.bad_steps,
            "health": self._health.lines,
            **self._saving.status(),
        }

    def summary(self) -> dict[str, Any]:
        saved = self._saving.status()
        totals = self._tally.summary()
        totals["staleness"] |= self._bound.summary()
        checkpoints = {"checkpoints": saved} if saved else {}
        return {"steps": self.finished_steps, "policy_version": self.version or 0, **checkpoints, **totals}

    def _learning_rate(self, step: int) -> float:
        training = self._config.training
        return learning_rate(
            step,
            peak=training.learning_rate,
            total_steps=training.steps,
            warmup_steps=training.warmup_steps,
            schedule=training.schedule,
            final_factor=training.final_learning_rate_factor,
        )

    def _group_metrics(self, taken: Taken, trains: int, filtered: int, failed: bool) -> dict[str, float]:
        """`taken` counts the step's groups; expired and replaced ones left before it."""
        return {
            "groups/taken": float(len(taken.groups)),
            "groups/without_signal": sum(each.equal_rewards for each, _ in taken.groups) / max(1, len(taken.groups)),
            "groups/trained": 0.0 if failed else float(trains),
            "groups/filtered": float(filtered + taken.left_before["filtered"]),
            "groups/expired": float(taken.left_before["expired"]),
            "groups/failed": float(trains if failed else 0),
        }


def selection_rules(config: Config) -> SelectionRules:
    return SelectionRules(
        groups_per_step=config.training.groups_per_step,
        publish_every=config.training.publish_every,
        max_staleness=config.rollout.staleness_limit,
        on_stale=config.rollout.on_stale,
        filter=config.training.filter,
        max_refill_factor=config.training.max_refill_factor,
    )
