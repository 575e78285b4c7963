"""One micro-batch: log-probs, proximal policy, correction, loss, and the sums that its metrics are made of.

Everything here is local to a rank; sums add over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.algorithms.advantages import RewardBatch
from asyncrl.algorithms.corrections import Corrected, CorrectionInputs, correct
from asyncrl.algorithms.divergence import estimate_kl
from asyncrl.algorithms.losses import LossInputs, MiniBatch, loss_needs, token_loss
from asyncrl.algorithms.masking import clamped_log_ratio, masked, response_mean
from asyncrl.algorithms.mini_batch import Judged, judge
from asyncrl.algorithms.proximal import PROXIMALS, ProximalInputs
from asyncrl.algorithms.reports import correction_sums
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.engines.fsdp.collate import Ints, MicroInputs, StepArrays, micro_inputs
from asyncrl.engines.fsdp.model import PolicyModel
from asyncrl.scheduling.microbatches import MicroBatch


@dataclass
class StepWork:
    """A step's batch as one rank holds it, [B, T] on the device; rewards: what advantages are estimated from, on the host;
    lengths_B: input tokens per response, 0 where none trains. proximal_BT: the recomputed log-probs of this rank's responses (of
    all, where something is judged over a whole mini-batch), None where lp_prox needs no forward pass of its own;
    sum_pi_squared_BT: Σπ² with them, where the advantage needs it; values_BT, returns_BT: a critic's, before its first update;
    reference_BT: the reference model's log-probs of this rank's responses, where the loss takes the divergence from it times
    kl_coefficient; kl_figures: what is known of the divergence before the first update."""

    arrays: StepArrays
    rewards: RewardBatch
    lengths_B: Ints
    mask_host_BT: torch.Tensor
    mask_BT: torch.Tensor
    advantages_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    staleness_BT: torch.Tensor
    proximal_BT: torch.Tensor | None = None
    sum_pi_squared_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None
    returns_BT: torch.Tensor | None = None
    reference_BT: torch.Tensor | None = None
    kl_coefficient: float = 0.0
    kl_figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdatePlan:
    """One optimizer update. micro_batches: this rank's; the rest comes from the whole mini-batch, so every rank has the same:
    chosen_B, its responses; coefficients_B, of every token of a response; tokens, the trainable ones, and responses, those that
    have one; left, the tokens that the correction keeps; whole, where the mini-batch is judged before it is cut."""

    micro_batches: list[MicroBatch]
    chosen_B: torch.Tensor
    coefficients_B: torch.Tensor
    tokens: int
    responses: int
    left: int
    whole: Judged | None = None


@dataclass(frozen=True)
class MicroBatchView:
    """The rows of a step's work that one forward pass covers; `index` selects them in [B, T]. An empty one stands for a rank that
    only keeps step: one masked token."""

    inputs: MicroInputs
    index: torch.Tensor
    width: int
    mask_bt: torch.Tensor
    empty: bool

    def rows(self, values_BT: torch.Tensor) -> torch.Tensor:
        return values_BT[self.index, : self.width]

    def corrected(self, whole: Judged) -> Corrected:
        flags = {name: self.rows(flag_BT) for name, flag_BT in whole.flags.items()}
        return Corrected(self.rows(whole.weights_BT), self.rows(whole.mask_BT), flags)


LOSS_TERMS = ("loss/policy", "loss/kl", "loss/entropy")
PER_RESPONSE = "kl/response_mean"


@dataclass(frozen=True)
class MicroSums:
    """scalars: flat name to a sum over the micro-batch's tokens (LOSS_TERMS: its part of that term of the loss; PER_RESPONSE: a
    sum over its responses); correction sums and maxima as `reports.correction_sums` has them."""

    scalars: Mapping[str, torch.Tensor]
    correction: torch.Tensor
    largest: torch.Tensor


def view(work: StepWork, sequences: Sequence[int], device: torch.device) -> MicroBatchView:
    """Cut the micro-batch of these sequences out of the work."""
    if not sequences:
        token, nothing = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        inputs = MicroInputs(token, nothing, nothing, nothing)
        return MicroBatchView(inputs, nothing, 1, torch.zeros(1, 1, dtype=torch.bool, device=device), empty=True)
    index = torch.as_tensor(sequences)
    lengths_b = work.lengths_B[index.numpy()]
    width = int((lengths_b - work.arrays.prompt_lengths_B[index.numpy()]).max()) + 1
    mask_bt = work.mask_host_BT[index, :width]
    inputs = micro_inputs(work.arrays, sequences, mask_bt, lengths_b)
    on_device = MicroInputs(*(getattr(inputs, name).to(device) for name in MicroInputs.__dataclass_fields__))
    return MicroBatchView(on_device, index.to(device), width, mask_bt.to(device), empty=False)


def advantage_metrics(work: StepWork) -> dict[str, float]:
    """advantage/mean and advantage/abs_mean over the step's trainable tokens; every rank has them all."""
    advantages_N = work.advantages_BT[work.mask_BT]
    if not len(advantages_N):
        return {}
    return {"advantage/mean": float(advantages_N.mean()), "advantage/abs_mean": float(advantages_N.abs().mean())}


def policy_log_probs(
    policy: PolicyModel, micro: MicroBatchView, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log_probs_bt, entropy_N, anchor): log-probs 0 outside the mask; the entropy has a gradient where it is asked for; `anchor`
    is a zero that ties every parameter into the graph."""
    inputs = micro.inputs
    asked = (inputs.input_ids, inputs.rows_N, inputs.columns_N, inputs.targets_N, False, entropy_gradient)
    log_probs_N, entropy_N, _ = policy(*asked)
    zeros_bt = torch.zeros(micro.mask_bt.shape, dtype=log_probs_N.dtype, device=log_probs_N.device)
    if micro.empty:
        return zeros_bt, entropy_N[:0], 0 * log_probs_N.sum()
    return zeros_bt.masked_scatter(micro.mask_bt, log_probs_N), entropy_N, zeros_bt.sum()


@torch.no_grad()
def policy_probabilities(
    policy: PolicyModel, micro: MicroBatchView, *, squares: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log_probs_bt, sum_pi_squared_bt), 0 outside the mask; Σπ² where `squares` asks for it."""
    inputs = micro.inputs
    log_probs_N, _, squares_N = policy(inputs.input_ids, inputs.rows_N, inputs.columns_N, inputs.targets_N, squares)
    zeros_bt = torch.zeros(micro.mask_bt.shape, dtype=log_probs_N.dtype, device=log_probs_N.device)
    if micro.empty:
        return zeros_bt, zeros_bt if squares else None
    sums_bt = zeros_bt.masked_scatter(micro.mask_bt, squares_N) if squares else None
    return zeros_bt.masked_scatter(micro.mask_bt, log_probs_N), sums_bt


def judged(work: StepWork, chosen_B: torch.Tensor, algorithm: AlgorithmConfig) -> Judged:
    """The mini-batch of these responses (bool[B]) as a whole; `work.proximal_BT` has the log-probs of all of them, where lp_prox
    is recomputed."""
    known = ProximalInputs(work.behaviour_BT, work.behaviour_BT, work.proximal_BT, work.staleness_BT)
    proximal_BT = PROXIMALS[algorithm.proximal].log_probs(known)
    mask_BT, ids_B = work.mask_BT & chosen_B[:, None], torch.from_numpy(work.arrays.ids_B).to(work.mask_BT.device)
    batch = MiniBatch(proximal_BT, work.behaviour_BT, work.advantages_BT, mask_BT, ids_B)
    return judge(algorithm.loss, algorithm.correction, batch, work.staleness_BT)


def micro_loss(
    policy: PolicyModel,
    work: StepWork,
    micro: MicroBatchView,
    coefficients_B: torch.Tensor,
    algorithm: AlgorithmConfig,
    levels: int,
    whole: Judged | None = None,
) -> tuple[torch.Tensor, MicroSums]:
    """This micro-batch's terms of the global loss, with gradient, and its sums. coefficients_B: see `algorithms.aggregation`;
    whole: its mini-batch, None where each response is corrected by itself."""
    mask_bt = micro.mask_bt
    log_probs_bt, entropy_N, anchor = policy_log_probs(policy, micro, entropy_gradient=algorithm.entropy_coefficient > 0)
    behaviour_bt, staleness_bt = micro.rows(work.behaviour_BT), micro.rows(work.staleness_BT)
    recomputed_bt = None if work.proximal_BT is None else micro.rows(work.proximal_BT)
    proximal_bt = PROXIMALS[algorithm.proximal].log_probs(
        ProximalInputs(behaviour_bt, log_probs_bt.detach(), recomputed_bt, staleness_bt)
    )
    # a loss without a ratio of its own is corrected for the whole way from the behaviour to the current policy
    sampled_as_bt = log_probs_bt.detach() if loss_needs(algorithm.loss).anchor == "none" else proximal_bt
    sampling = CorrectionInputs.of(sampled_as_bt, behaviour_bt, staleness_bt, mask_bt)
    corrected = correct(algorithm.correction, sampling) if whole is None else micro.corrected(whole)
    selected_bt = None if whole is None or whole.selected_BT is None else micro.rows(whole.selected_BT)
    inputs = LossInputs(
        log_probs_bt,
        proximal_bt,
        behaviour_bt,
        micro.rows(work.advantages_BT),
        corrected.weights_BT,
        corrected.mask_BT & mask_bt,
        selected_bt,
    )
    losses = token_loss(algorithm.loss, inputs)
    coefficients_b = coefficients_B[micro.index, None].to(losses.values_BT.dtype)
    added, figures = _regularisers(algorithm, work, micro, log_probs_bt, entropy_N, kept_bt=inputs.mask_BT)
    terms = {name: (values * coefficients_b).sum() for name, values in {"loss/policy": losses.values_BT, **added}.items()}
    loss = torch.stack([*terms.values()]).sum() + anchor
    moved_bt = clamped_log_ratio(log_probs_bt.detach(), proximal_bt, mask_bt)
    scalars = {
        **{name: term.detach().double() for name, term in terms.items()},
        **figures,
        "policy/entropy": entropy_N.detach().sum(dtype=torch.float64),
        "policy/kl_proximal": masked(moved_bt.exp() - 1 - moved_bt, mask_bt).sum(dtype=torch.float64),
        **{f"loss/{name}": flag.sum(dtype=torch.float64) for name, flag in losses.flags.items()},
    }
    sums, largest = correction_sums(
        ratio_BT=sampling.ratio_BT,
        behaviour_BT=behaviour_bt,
        proximal_BT=sampled_as_bt,
        staleness_BT=staleness_bt,
        mask_BT=mask_bt,
        flags=corrected.flags,
        levels=levels,
    )
    return loss, MicroSums(scalars, sums, largest)


def _regularisers(
    algorithm: AlgorithmConfig,
    work: StepWork,
    micro: MicroBatchView,
    log_probs_bt: torch.Tensor,
    entropy_N: torch.Tensor,
    *,
    kept_bt: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(token values that are added to the policy loss, figures): β·KL and −c·entropy, where they are asked for, on the tokens
    that train; the divergence's figures are over all trainable ones."""
    added: dict[str, torch.Tensor] = {}
    figures: dict[str, torch.Tensor] = {}
    if algorithm.kl is not None and work.reference_BT is not None:
        kl_bt = masked(estimate_kl(algorithm.kl.name, log_probs_bt, micro.rows(work.reference_BT)), micro.mask_bt)
        added["loss/kl"] = work.kl_coefficient * masked(kl_bt, kept_bt)
        known_bt = kl_bt.detach().double()
        figures = {"kl/mean": known_bt.sum(), PER_RESPONSE: response_mean(known_bt, micro.mask_bt).sum()}
    if algorithm.entropy_coefficient:
        entropy_bt = torch.zeros_like(log_probs_bt)
        if not micro.empty:
            entropy_bt = entropy_bt.masked_scatter(micro.mask_bt, entropy_N)
        added["loss/entropy"] = -algorithm.entropy_coefficient * masked(entropy_bt, kept_bt)
    return added, figures
