"""The reference model: frozen beside the policy, asked once a step, and what the policy's divergence from it costs.

every n-th version: the policy's shards ─┐
                                         ▼
the step's batch ──▶ log-probs ──▶ where loss:   β·KL of each token, added in update.py
                              └──▶ where reward: β·KL of each token, taken from its reward before advantages are estimated
the step's divergence ──▶ β of the next, where it adapts
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.divergence import adapted_coefficient, estimate_kl, mean_kl
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import Kl
from asyncrl.config.schema import Config
from asyncrl.engines.fsdp.model import PolicyModel, load_policy
from asyncrl.engines.fsdp.process_group import RankGroup
from asyncrl.engines.fsdp.sharding import reshard, spread_over_ranks
from asyncrl.engines.fsdp.state import MODEL, REFERENCE, Described, check_match, model_state
from asyncrl.engines.fsdp.update import StepWork, UpdatePlan, policy_probabilities, view
from asyncrl.errors import UserError

PATH = "algorithm.reference.path"
WEIGHTS, COEFFICIENT, VERSION = (REFERENCE + name for name in (MODEL, "coefficient", "version"))


def load_reference(
    config: Config, policy: PolicyModel, policy_path: str | Path, *, device: torch.device, with_weights: bool
) -> PolicyModel:
    """From algorithm.reference.path, or else from where the policy comes from; without gradient. Raises UserError for a model
    that the policy cannot be compared with, and as `load_policy`."""
    settings = config.algorithm.reference
    path = settings.path or policy_path
    reference = load_policy(
        config.model, path, temperature=config.rollout.temperature, device=device, with_weights=with_weights, key=PATH
    )
    mine, theirs = (each.model.config.get_text_config().vocab_size for each in (policy, reference))
    if mine != theirs:
        raise UserError(
            f"{PATH} is {path}, with a vocabulary of {theirs}, but the policy's has {mine}, and their distributions cannot be "
            "compared: give a model with the policy's vocabulary"
        )
    if settings.refresh_every and _shapes(policy) != _shapes(reference):
        raise UserError(
            f"{PATH} is {path}, whose parameters are not those of the policy in name and shape, and "
            "algorithm.reference.refresh_every copies the policy's into it: give a model like the policy, or set "
            "algorithm.reference.refresh_every to 0"
        )
    reference.eval()
    reference.requires_grad_(False)
    return reference


class Reference:
    """Its model and coefficient on one rank. Every rank calls the same methods in the same order. version: the policy version
    whose weights it has; 0 for those that it was loaded with."""

    def __init__(self, config: Config, model: PolicyModel, group: RankGroup, device: torch.device):
        assert config.algorithm.kl is not None, "a reference is there for algorithm.kl"
        self._adaptive, self._every = config.algorithm.kl.adaptive, config.algorithm.reference.refresh_every
        self._group, self._device = group, device
        self._model = spread_over_ranks(model, config, group, device)
        self._model.probe_head(device)
        reshard(self._model)
        self.coefficient, self.version = config.algorithm.kl.coefficient, 0

    @torch.no_grad()
    def refresh(self, policy: PolicyModel, version: int) -> None:
        """Before a step that begins at `version`: take the policy's shards where a multiple of refresh_every has come. No step
        was trained between the publication of that multiple and this one, so the policy's weights are still that version's."""
        if not self._every or version // self._every <= self.version // self._every:
            return
        for mine, theirs in zip(_tensors(self._model), _tensors(policy), strict=True):
            mine.copy_(theirs)
        self.version = version // self._every * self._every

    def judge(self, work: StepWork, plans: list[UpdatePlan], kl: Kl) -> dict[str, float]:
        """Fill in what the loss or the reward needs of it. Returns figures; those of a divergence in the loss come from the loss.

        In the reward it is the divergence of the policy before the first update, whose log-probs of the whole batch are in
        `work.proximal_BT`."""
        reference_BT = self._log_probs(work, plans)
        figures = {"kl/coefficient": self.coefficient, **({"kl/reference_version": float(self.version)} if self._every else {})}
        if kl.where == "loss":
            work.reference_BT, work.kl_coefficient = reference_BT, self.coefficient
            return figures
        assert work.proximal_BT is not None
        mask_BT = work.mask_host_BT
        kl_BT = masked(estimate_kl(kl.name, work.proximal_BT, self._group.sum(reference_BT)).cpu(), mask_BT)
        work.rewards = replace(work.rewards, penalty_BT=self.coefficient * kl_BT)
        total, responses = float(kl_BT.sum(dtype=torch.float64)), max(1, int(mask_BT.any(1).sum()))
        return figures | {
            "kl/mean": total / max(1, int(mask_BT.sum())),
            "kl/response_mean": float(mean_kl(kl_BT.double(), mask_BT)),
            "kl/reward_mean": -self.coefficient * total / responses,
        }

    def adapt(self, kl: float, responses: int) -> None:
        """After a step of so many responses that moved the policy: its divergence moves the coefficient, where that adapts."""
        if self._adaptive is not None and math.isfinite(kl):
            self.coefficient = adapted_coefficient(self.coefficient, self._adaptive, kl=kl, responses=responses)

    # ---- its state, saved and loaded ---------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it: a coefficient that adapts, weights that were refreshed. What is loaded again from its
        path is not there."""
        found: dict[str, torch.Tensor] = {}
        if self._adaptive is not None:
            found[COEFFICIENT] = torch.tensor(self.coefficient, dtype=torch.float64)
        if self._every:
            found[VERSION] = torch.tensor(self.version, dtype=torch.int64)
            found |= model_state(REFERENCE, self._model)
        return found

    def room(self, described: Described) -> dict[str, torch.Tensor]:
        """Tensors to read a checkpoint into; a coefficient that adapts from now on has none there. Raises CheckpointError."""
        own = {name: tensor for name, tensor in self.state().items() if name in described or name != COEFFICIENT}
        check_match(own, {name: what for name, what in described.items() if name in own or name.startswith(WEIGHTS)})
        return own

    def restore(self, room: Mapping[str, torch.Tensor]) -> None:
        """The weights are in place; take the numbers."""
        if COEFFICIENT in room:
            self.coefficient = float(room[COEFFICIENT])
        if VERSION in room:
            self.version = int(room[VERSION])

    @torch.no_grad()
    def _log_probs(self, work: StepWork, plans: list[UpdatePlan]) -> torch.Tensor:
        """[B, T] of this rank's responses, 0 elsewhere, in the very micro-batches that will train them."""
        log_probs_BT = torch.zeros_like(work.behaviour_BT)
        for micro_batch in (micro_batch for plan in plans for micro_batch in plan.micro_batches):
            micro = view(work, micro_batch, self._device)
            log_probs_bt, _ = policy_probabilities(self._model, micro, squares=False)
            if micro_batch:
                log_probs_BT[micro.index, : micro.width] = log_probs_bt
        reshard(self._model)
        return log_probs_BT


def _shapes(model: PolicyModel) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.hf_named_parameters()}


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of the parameters, then the buffers, in the model's order."""
    shards = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [*shards, *model.buffers()]
