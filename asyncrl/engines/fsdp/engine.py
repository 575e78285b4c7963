"""The engine: a sharded policy, its optimizer, and a step of training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.advantages import RewardBatch, estimate, trainable_mask
from asyncrl.algorithms.aggregation import response_coefficients
from asyncrl.algorithms.mini_batch import is_needed
from asyncrl.algorithms.proximal import PROXIMALS
from asyncrl.algorithms.reports import correction_metrics
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.schema import Config
from asyncrl.engines.fsdp import state
from asyncrl.engines.fsdp.collate import (
    StepArrays,
    collate_components,
    collate_greedy,
    collate_step,
    collate_teacher,
    input_lengths,
)
from asyncrl.engines.fsdp.critic import Critic, ValueModel
from asyncrl.engines.fsdp.model import PolicyModel
from asyncrl.engines.fsdp.process_group import RankGroup
from asyncrl.engines.fsdp.reference import Reference
from asyncrl.engines.fsdp.saving import Saver, Saves
from asyncrl.engines.fsdp.sharding import adamw, clipped_norm, reshard, spread_over_ranks
from asyncrl.engines.fsdp.update import (
    LOSS_TERMS,
    PER_RESPONSE,
    MicroSums,
    StepWork,
    UpdatePlan,
    advantage_metrics,
    judged,
    micro_loss,
    policy_probabilities,
    view,
)
from asyncrl.errors import CheckpointError
from asyncrl.protocols import StepOutcome, TrainBatch
from asyncrl.scheduling.microbatches import plan_microbatches


@dataclass(frozen=True)
class UpdateResult:
    """Figures of an update, the same on every rank. finite: its loss and gradient are; made: the weights moved."""

    finite: bool
    made: bool
    grad_norm: float
    scalars: dict[str, float]
    correction: torch.Tensor
    largest: torch.Tensor


class FsdpEngine:
    """A TrainingEngine on FSDP2: `fully_shard` per transformer block and root, AdamW on float32 master weights.

    The gradient is a sum over ranks with global denominators: the same for any cut into micro-batches and any number of ranks.
    """

    def __init__(
        self,
        config: Config,
        policy: PolicyModel,
        group: RankGroup,
        device: torch.device,
        saves: Saves | None = None,
        critic: ValueModel | None = None,
        reference: PolicyModel | None = None,
    ):
        """saves: how its state lies in files; None for an engine that is never saved or loaded. critic: for an advantage that
        needs one. reference: for algorithm.kl."""
        self._config, self._group, self._device, self._saves = config, group, device, saves
        self._algorithm = config.algorithm
        self._policy = spread_over_ranks(policy, config, group, device)
        self._parameters = list(self._policy.parameters())
        self._policy.probe_head(device)
        reshard(self._policy)
        self._optimizer = adamw(self._parameters, config.training, learning_rate=config.training.learning_rate)
        self._critic = None if critic is None else Critic(config, critic, group, device)
        self._reference = None if reference is None else Reference(config, reference, group, device)
        self._saver: Saver | None = None
        if saves is not None:
            self._saver = Saver(saves, group, timeout_seconds=config.checkpoint.timeout_seconds)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def broadcast(self, payload: bytes | None) -> bytes:
        return self._group.broadcast(payload)

    def named_parameters(self) -> Iterator[tuple[str, DTensor]]:
        """The live master weights by their Hugging Face names, a tied one once; `to_local()` is this rank's shard."""
        return self._policy.hf_named_parameters()

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._group.close()

    # ---- its state, saved and loaded ---------------------------------------------------------------------------

    def begin_save(self, folder: str) -> float:
        return self._need_saver().begin(folder, self._whole_state)

    def save_done(self) -> bool:
        return self._need_saver().done()

    def finish_save(self, timeout: float) -> float:
        return self._need_saver().finish(timeout)

    def load(self, folder: str) -> None:
        """Each rank reads its shards for itself; then all agree that all could."""
        failure = ""
        try:
            self._load_own(folder)
        except CheckpointError as error:
            failure = str(error)
        failures = [text for text in self._group.gather_texts(failure) if text]
        if failures:
            raise CheckpointError("; ".join(dict.fromkeys(failures)))

    def _load_own(self, folder: str) -> None:
        assert self._saves is not None, "this engine was made without files"
        files = self._saves.files
        described = files.describe(folder)
        room = state.make_room(self._trained(), described)
        generators, own = state.generator_room(described, self.rank)
        kept = {} if self._reference is None else self._reference.room(described)
        files.read(folder, room | generators | kept)
        if self._reference is not None:
            self._reference.restore(kept)
        state.restore_generators(generators, self._device, self.rank, own=own)

    def _whole_state(self) -> dict[str, torch.Tensor]:
        live = state.live_state(self._trained()) | ({} if self._reference is None else self._reference.state())
        return {name: tensor.detach() for name, tensor in live.items()} | state.generator_state(self.rank, self._device)

    def _trained(self) -> list[state.Trained]:
        policy = state.Trained("", self._policy, self._optimizer)
        return [policy] if self._critic is None else [policy, state.Trained(state.CRITIC, *self._critic.trained())]

    def _need_saver(self) -> Saver:
        assert self._saver is not None, "this engine was made without files"
        return self._saver

    # ---- training ----------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> StepOutcome:
        if not batch.groups:
            return StepOutcome(updates=0, bad_updates=0)
        work, plans = self._prepare(batch)
        for parameter_group in self._optimizer.param_groups:
            parameter_group["lr"] = batch.learning_rate
        began = time.thread_time()
        if self._reference is not None:
            self._reference.refresh(self._policy, batch.version)
        plans = self._anchor(work, plans, updates=len(plans) * batch.epochs)
        told = advantage_metrics(work)
        if self._critic is not None:
            told |= self._critic.learn(work, plans, batch)
        warming = self._critic is not None and batch.step <= self._algorithm.critic.warmup_steps
        results = [] if warming else [self._update(work, plan) for _ in range(batch.epochs) for plan in plans]
        outcome = _outcome(results, passes=batch.epochs, tokens=int(work.mask_host_BT.sum()))
        self._adapt(work, results[: len(plans)], plans)
        outcome = replace(outcome, metrics={**outcome.metrics, **work.kl_figures, **told})
        spent = float(self._group.sum(torch.tensor([time.thread_time() - began], device=self._device)))
        return replace(outcome, metrics={**outcome.metrics, "time/compute_cpu_s": spent})

    def gradients(self, batch: TrainBatch, algorithm: AlgorithmConfig | None = None) -> dict[str, torch.Tensor]:
        """Whole gradients of the batch's first mini-batch, without an update: for comparing cuts, ranks and algorithms.
        algorithm: in place of the configuration's, for this once."""
        before, self._algorithm = self._algorithm, algorithm or self._algorithm
        try:
            work, plans = self._prepare(batch)
            self._backward(work, self._anchor(work, plans[:1], updates=1)[0])
        finally:
            self._algorithm = before
        found = {name: parameter.grad.full_tensor().clone() for name, parameter in self.named_parameters()}
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs float32[B, T] of the batch's trainable tokens under the present weights; 0 elsewhere, and on other ranks'
        rows."""
        work, plans = self._prepare(batch)
        self._recompute_proximal(work, plans)
        assert work.proximal_BT is not None
        return work.proximal_BT

    @torch.no_grad()
    def judge(self, batch: TrainBatch, temperature: float, rounded: bool) -> npt.NDArray[np.float32]:
        work, plans = self._prepare(batch)
        shards = [parameter.to_local() if isinstance(parameter, DTensor) else parameter.data for parameter in self._parameters]
        kept = [shard.clone() for shard in shards] if rounded else []
        before, self._policy.temperature = self._policy.temperature, temperature
        try:
            for shard in shards if rounded else ():
                shard.copy_(shard.bfloat16())
            self._recompute_proximal(work, plans)
        finally:
            self._policy.temperature = before
            for shard, values in zip(shards, kept, strict=False):
                shard.copy_(values)
        assert work.proximal_BT is not None
        whole_BT = self._group.sum(work.proximal_BT).cpu()
        return whole_BT[work.mask_host_BT].float().numpy()

    # ---- a step, part by part ----------------------------------------------------------------------------------

    def _prepare(self, batch: TrainBatch) -> tuple[StepWork, list[UpdatePlan]]:
        """What every rank works out alike: arrays, advantages over the whole batch, and one plan per mini-batch with a token to
        train."""
        config = self._config
        arrays = collate_step(batch.groups, batch.version)
        rewards, advantage = self._rewards(batch, arrays), self._algorithm.advantage
        mask_BT = trainable_mask(advantage, rewards)
        # a forward pass comes first, in `_anchor`
        later = advantage.needs.probabilities or advantage.needs.critic or self._kl_is_in_the_reward()
        advantages_BT = torch.zeros_like(arrays.behaviour_BT) if later else estimate(advantage, rewards)[0]
        lengths_B = input_lengths(arrays, mask_BT)
        on_device = (values.to(self._device) for values in (mask_BT, advantages_BT, arrays.behaviour_BT, arrays.staleness_BT))
        work = StepWork(arrays, rewards, lengths_B, mask_BT, *on_device)
        trainable_B = mask_BT.sum(1)
        plans = []
        for groups in batch.mini_batches:
            chosen_B = torch.isin(torch.from_numpy(arrays.groups_B), torch.tensor(groups))
            tokens_B = torch.where(chosen_B, trainable_B, 0)
            sequences = torch.nonzero(tokens_B)[:, 0].numpy()
            if not len(sequences):
                continue
            plan = plan_microbatches(
                lengths_B[sequences].tolist(), budget_tokens=config.training.microbatch_tokens, ranks=self.world_size
            )[self.rank]
            mine, tokens = [tuple(sequences[list(cut)].tolist()) for cut in plan], int(tokens_B.sum())
            plans.append(
                UpdatePlan(mine, chosen_B.to(self._device), self._coefficients(tokens_B), tokens, len(sequences), tokens)
            )
        return work, plans

    def _rewards(self, batch: TrainBatch, arrays: StepArrays) -> RewardBatch:
        needs = self._algorithm.advantage.needs
        rewards = RewardBatch(arrays.rewards_B, torch.from_numpy(arrays.groups_B), arrays.mask_BT)
        if needs.greedy:
            rewards = replace(rewards, greedy_B=collate_greedy(batch.groups))
        if needs.teacher:
            teacher_BT = collate_teacher(batch.groups, arrays.behaviour_BT)
            rewards = replace(rewards, teacher_BT=teacher_BT, behaviour_BT=arrays.behaviour_BT)
        if not needs.components:
            return rewards
        weights = self._config.reward.component_weights
        components_BK = collate_components(batch.groups, list(weights))
        return replace(rewards, components_BK=components_BK, component_weights_K=torch.tensor(list(weights.values())))

    def _coefficients(self, tokens_B: torch.Tensor) -> torch.Tensor:
        config = self._config
        values = response_coefficients(
            self._algorithm.loss.aggregation, tokens_B, max_response_tokens=config.rollout.max_response_tokens
        )
        return values.to(self._device)

    def _anchor(self, work: StepWork, plans: list[UpdatePlan], *, updates: int) -> list[UpdatePlan]:
        """Before the first of so many updates: lp_prox where it takes a forward pass of its own, and what is decided over each
        mini-batch as a whole."""
        algorithm, needs = self._algorithm, self._algorithm.advantage.needs
        judges = is_needed(algorithm.loss, algorithm.correction)
        in_reward = self._kl_is_in_the_reward()
        as_wholes = judges or needs.mini_batch or in_reward
        if in_reward or (PROXIMALS[algorithm.proximal].recomputes and (updates > 1 or as_wholes)):
            self._recompute_proximal(work, plans, squares=needs.probabilities)
        if as_wholes and work.proximal_BT is not None:
            work.proximal_BT = self._group.sum(work.proximal_BT)
        if algorithm.kl is not None:
            assert self._reference is not None, "the configuration's algorithm.kl decides whether there is one"
            work.kl_figures = self._reference.judge(work, plans, algorithm.kl)
        if needs.probabilities:
            self._estimate_from_probabilities(work)
        elif needs.critic:
            assert self._critic is not None, "the configuration's advantage decides whether there is one"
            self._critic.judge(work, plans)
        elif in_reward:
            work.advantages_BT = estimate(algorithm.advantage, work.rewards)[0].to(self._device)
        return [self._judged(work, plan) for plan in plans] if judges else plans

    def _estimate_from_probabilities(self, work: StepWork) -> None:
        assert work.proximal_BT is not None
        assert work.sum_pi_squared_BT is not None
        known = replace(
            work.rewards,
            log_probs_BT=work.proximal_BT.cpu(),
            sum_pi_squared_BT=self._group.sum(work.sum_pi_squared_BT).cpu(),
        )
        work.advantages_BT = estimate(self._algorithm.advantage, known)[0].to(self._device)

    def _judged(self, work: StepWork, plan: UpdatePlan) -> UpdatePlan:
        whole = judged(work, plan.chosen_B, self._algorithm)
        coefficients_B = self._coefficients(whole.lengths_B)
        return replace(plan, coefficients_B=coefficients_B, left=int(whole.mask_BT.sum()), whole=whole)

    def _kl_is_in_the_reward(self) -> bool:
        return self._algorithm.kl is not None and self._algorithm.kl.where == "reward"

    def _adapt(self, work: StepWork, first: list[UpdateResult], plans: list[UpdatePlan]) -> None:
        """The coefficient of the divergence moves after a step in which the policy did. first: the results of its first pass."""
        if self._reference is None or not any(result.made for result in first):
            return
        responses = sum(plan.responses for plan in plans)
        summed = sum(result.scalars.get(PER_RESPONSE, 0.0) * plan.responses for result, plan in zip(first, plans, strict=True))
        self._reference.adapt(work.kl_figures.get(PER_RESPONSE, summed / responses), responses)

    def _recompute_proximal(self, work: StepWork, plans: list[UpdatePlan], *, squares: bool = False) -> None:
        """lp_prox of this rank's responses, and Σπ² if asked for, in the very micro-batches that will train them."""
        work.proximal_BT = torch.zeros_like(work.behaviour_BT)
        work.sum_pi_squared_BT = torch.zeros_like(work.behaviour_BT) if squares else None
        for micro_batch in (micro_batch for plan in plans for micro_batch in plan.micro_batches):
            micro = view(work, micro_batch, self._device)
            log_probs_bt, sums_bt = policy_probabilities(self._policy, micro, squares=squares)
            if micro_batch:
                work.proximal_BT[micro.index, : micro.width] = log_probs_bt
            if micro_batch and work.sum_pi_squared_BT is not None and sums_bt is not None:
                work.sum_pi_squared_BT[micro.index, : micro.width] = sums_bt
        reshard(self._policy)

    def _backward(self, work: StepWork, plan: UpdatePlan) -> list[MicroSums]:
        levels = self._config.rollout.staleness_limit + 1
        sums = []
        for micro_batch in plan.micro_batches:
            micro = view(work, micro_batch, self._device)
            loss, found = micro_loss(self._policy, work, micro, plan.coefficients_B, self._algorithm, levels, plan.whole)
            (loss * self.world_size).backward()  # FSDP averages over ranks; the loss's terms are to be summed
            sums.append(found)
        return sums

    def _update(self, work: StepWork, plan: UpdatePlan) -> UpdateResult:
        """Backward, clip, step. Where loss or gradient is not finite, or no token is left to train, the weights stay, on every
        rank alike."""
        sums = self._backward(work, plan)
        names = list(sums[0].scalars)
        scalars = torch.stack([torch.stack(list(found.scalars.values())) for found in sums]).sum(0)
        correction = torch.stack([found.correction for found in sums]).sum(0)
        largest = torch.stack([found.largest for found in sums]).amax(0)
        reduced = self._group.sum(torch.cat([scalars, correction.flatten()]))
        scalars, correction = reduced[: len(names)], reduced[len(names) :].view_as(correction)
        grad_norm = clipped_norm(self._parameters, self._config.training.max_grad_norm)
        values = dict(zip(names, scalars.tolist(), strict=True))
        finite = math.isfinite(grad_norm) and all(math.isfinite(values[name]) for name in LOSS_TERMS if name in values)
        made = finite and plan.left > 0
        if made:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        counts = dict.fromkeys(LOSS_TERMS, 1) | {PER_RESPONSE: plan.responses}
        shares = {name: value / counts.get(name, plan.tokens) for name, value in values.items()}
        return UpdateResult(finite, made, grad_norm, shares, correction, self._group.largest(largest))


def _outcome(results: list[UpdateResult], *, passes: int, tokens: int) -> StepOutcome:
    """Metrics: means over the finite updates; the correction's over the first pass; tokens counted once, not per pass."""
    finite = [result for result in results if result.finite]
    metrics = {"tokens/trained": float(tokens if any(result.made for result in results) else 0)}
    if finite:
        for name in finite[0].scalars:
            metrics[name] = sum(result.scalars[name] for result in finite) / len(finite)
        metrics["grad/norm"] = sum(result.grad_norm for result in finite) / len(finite)
        first = [result for result in results[: len(results) // passes] if result.finite]
        if first:
            sums = torch.stack([result.correction for result in first]).sum(0)
            metrics |= correction_metrics(sums, torch.stack([result.largest for result in first]).amax(0))
    updates = sum(result.made for result in results)
    return StepOutcome(updates=updates, bad_updates=len(results) - len(finite), metrics=metrics)
