"""The critic of PPO: values of every token, learnt beside the policy on a sharded model of its own.

judge: values of the whole batch ──▶ GAE ──▶ advantages (policy) and returns ──▶ learn: value loss, one update a mini-batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl.algorithms.advantages import estimate, gae_and_returns, token_rewards
from asyncrl.algorithms.divergence import value_loss
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import Gae
from asyncrl.config.schema import Config
from asyncrl.engines.fsdp.model import blocks_of, load_policy
from asyncrl.engines.fsdp.process_group import RankGroup
from asyncrl.engines.fsdp.sharding import InBlocks, adamw, clipped_norm, reshard, spread_over_ranks
from asyncrl.engines.fsdp.update import MicroBatchView, StepWork, UpdatePlan, view
from asyncrl.protocols import TrainBatch


class ValueModel(InBlocks):
    """A causal language model's body, and a linear head of one number that starts at 0."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """float32[N]: the value before the token that follows position (rows[i], columns[i]); input_ids int64[b, L]."""
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden[rows, columns]).float().sum(1)  # of one number: FSDP warns of views
        return values

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.named_parameters()

    def layers(self) -> list[nn.Module]:
        return blocks_of(self.model)


def load_critic(config: Config, policy_path: str | Path, *, device: torch.device, with_weights: bool) -> ValueModel:
    """From algorithm.critic.path, or else from the policy's own weights. Raises UserError, as `load_policy`."""
    path = config.algorithm.critic.path or policy_path
    policy = load_policy(
        config.model, path, temperature=1.0, device=device, with_weights=with_weights, key="algorithm.critic.path"
    )
    return ValueModel(policy.model)


@dataclass(frozen=True)
class _Sums:
    """Over a mini-batch's trainable tokens, with R the return and V the value: Σ loss, Σ(R − V)², ΣR, ΣR², the number."""

    loss: float
    errors: float
    returns: float
    squares: float
    tokens: float


class Critic:
    """Its model, optimizer and metrics on one rank. Every rank calls the same methods in the same order."""

    def __init__(self, config: Config, model: ValueModel, group: RankGroup, device: torch.device):
        self._config, self._settings = config, config.algorithm.critic
        self._group, self._device = group, device
        self._model = spread_over_ranks(model, config, group, device)
        self._parameters = list(self._model.parameters())
        self._optimizer = adamw(self._parameters, config.training, learning_rate=self._settings.learning_rate)

    def trained(self) -> tuple[ValueModel, torch.optim.Optimizer]:
        return self._model, self._optimizer

    def judge(self, work: StepWork, plans: list[UpdatePlan]) -> None:
        """Fill in the work's advantages and returns from the present values."""
        entry = self._config.algorithm.advantage
        assert isinstance(entry, Gae)
        values_BT = self._group.sum(self._values(work, plans)).cpu()
        judged = replace(work.rewards, values_BT=values_BT)
        advantages_BT, mask_BT = estimate(entry, judged)
        rewards_BT = token_rewards(replace(judged, mask_BT=mask_BT))
        _, returns_BT = gae_and_returns(rewards_BT, values_BT, mask_BT, gamma=entry.gamma, lam=entry.lam)
        work.advantages_BT = advantages_BT.to(self._device)
        work.values_BT, work.returns_BT = values_BT.to(self._device), returns_BT.to(self._device)

    def learn(self, work: StepWork, plans: list[UpdatePlan], batch: TrainBatch) -> dict[str, float]:
        """One update per mini-batch and pass; metrics, means over the updates that were made."""
        share = batch.learning_rate / self._config.training.learning_rate  # the schedule is the policy's
        for parameter_group in self._optimizer.param_groups:
            parameter_group["lr"] = self._settings.learning_rate * share
        results = [self._update(work, plan) for _ in range(batch.epochs) for plan in plans]
        found = [result for result in results if result]
        metrics = {name: sum(result[name] for result in found) / len(found) for name in (found[0] if found else ())}
        return {**metrics, "critic/bad_updates": float(len(results) - len(found))}

    def _update(self, work: StepWork, plan: UpdatePlan) -> dict[str, float]:
        """Empty where loss or gradient is not finite, and the weights stay."""
        sums = torch.zeros(5, dtype=torch.float64, device=self._device)
        for micro_batch in plan.micro_batches:
            micro = view(work, micro_batch, self._device)
            loss, found = self._micro_loss(work, micro, plan.tokens)
            (loss * self._group.world_size).backward()  # FSDP averages over ranks; the loss's terms are to be summed
            sums += found
        totals = _Sums(*self._group.sum(sums).tolist())
        norm = clipped_norm(self._parameters, self._config.training.max_grad_norm)
        is_finite = math.isfinite(norm) and math.isfinite(totals.loss)
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not is_finite:
            return {}
        spread = totals.squares / totals.tokens - (totals.returns / totals.tokens) ** 2
        explained = 1 - totals.errors / totals.tokens / spread if spread > 1e-12 else 0.0
        return {"critic/loss": totals.loss, "critic/explained_variance": explained, "critic/grad_norm": norm}

    def _micro_loss(self, work: StepWork, micro: MicroBatchView, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This micro-batch's terms of the mean over the mini-batch's tokens, and its sums."""
        assert work.values_BT is not None
        assert work.returns_BT is not None
        values_bt, anchor = self._values_of(micro)
        old_bt, returns_bt, mask_bt = micro.rows(work.values_BT), micro.rows(work.returns_BT), micro.mask_bt
        loss = value_loss(values_bt, old_bt, returns_bt, mask_bt, clip=self._settings.value_clip).sum() / tokens + anchor
        seen_bt, returns_bt = masked(values_bt.detach(), mask_bt).double(), masked(returns_bt, mask_bt).double()
        apart = (returns_bt - seen_bt).square().sum()
        sums = [loss.detach().double(), apart, returns_bt.sum(), returns_bt.square().sum(), mask_bt.sum().double()]
        return loss, torch.stack(sums)

    @torch.no_grad()
    def _values(self, work: StepWork, plans: list[UpdatePlan]) -> torch.Tensor:
        """float32[B, T] of this rank's responses, 0 elsewhere."""
        values_BT = torch.zeros_like(work.behaviour_BT)
        for micro_batch in (micro_batch for plan in plans for micro_batch in plan.micro_batches):
            micro = view(work, micro_batch, self._device)
            values_bt, _ = self._values_of(micro)
            if micro_batch:
                values_BT[micro.index, : micro.width] = values_bt
        reshard(self._model)
        return values_BT

    def _values_of(self, micro: MicroBatchView) -> tuple[torch.Tensor, torch.Tensor]:
        """(values_bt, anchor): values 0 outside the mask; `anchor` is a zero that ties every parameter into the graph."""
        values_N = self._model(micro.inputs.input_ids, micro.inputs.rows_N, micro.inputs.columns_N)
        zeros_bt = torch.zeros(micro.mask_bt.shape, dtype=values_N.dtype, device=values_N.device)
        if micro.empty:
            return zeros_bt, 0 * values_N.sum()
        return zeros_bt.masked_scatter(micro.mask_bt, values_N), zeros_bt.sum()
