"""Policy losses, per token. A advantage; r = exp(lp − lp_prox); w the correction weight, multiplied in unless a loss says
otherwise.

    clipped.py    a bounded ratio of each token     sequence.py     a ratio of the whole response
    behaviour.py  the ratio to the behaviour        covariance.py   a few tokens of the mini-batch singled out
                  policy, or none                   inputs.py       what they are given

What depends on the whole mini-batch is decided by a loss's `select`, once, before the first backward pass; each micro-batch is
then given its rows of it, so that the gradient is the same for any cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncrl.algorithms.custom import call, needs_of
from asyncrl.algorithms.losses.behaviour import dppo_kl, dppo_tv, dro, m2po, m2po_selection, reinforce
from asyncrl.algorithms.losses.clipped import cispo, ppo_clip, sapo
from asyncrl.algorithms.losses.covariance import clip_cov, clip_cov_selection, kl_cov, kl_cov_selection
from asyncrl.algorithms.losses.inputs import LossInputs, MiniBatch, TokenLoss
from asyncrl.algorithms.losses.sequence import geometric_weight, gmpo, gspo, topr
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import Entry, Needs, UserFunction
from asyncrl.errors import UserError


def token_weight(inputs: LossInputs) -> torch.Tensor:
    """Each token's own weight."""
    return inputs.weights_BT


@dataclass(frozen=True)
class Loss:
    """values: (entry, inputs) to token values without w; weight: what they are multiplied by, None for a loss that takes no w;
    select: (entry, whole mini-batch) to bool[B, T], None for a loss that needs no more than each response."""

    values: Callable[[Any, LossInputs], TokenLoss]
    weight: Callable[[LossInputs], torch.Tensor] | None = token_weight
    select: Callable[[Any, MiniBatch], torch.Tensor] | None = None


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip),
    "cispo": Loss(cispo),
    "gspo": Loss(gspo),
    "gmpo": Loss(gmpo, weight=geometric_weight),
    "sapo": Loss(sapo),
    "dppo_tv": Loss(dppo_tv, weight=None),
    "dppo_kl": Loss(dppo_kl, weight=None),
    "clip_cov": Loss(clip_cov, select=clip_cov_selection),
    "kl_cov": Loss(kl_cov, select=kl_cov_selection),
    "dro": Loss(dro, weight=None),
    "topr": Loss(topr, weight=None),
    "m2po": Loss(m2po, weight=None, select=m2po_selection),
    "reinforce": Loss(reinforce),
    "gpg": Loss(reinforce),
}
"""Name of the entry to its definition."""


def loss_needs(entry: Entry) -> Needs:
    """What the loss needs; of a user's function what its decorator said."""
    return needs_of("loss", entry) if isinstance(entry, UserFunction) else entry.needs


def select(entry: Entry, batch: MiniBatch) -> torch.Tensor | None:
    """bool[B, T], the tokens that the loss singles out of the whole mini-batch; None for a loss that singles out none. Its rows
    go into `LossInputs.selected_BT`."""
    if isinstance(entry, UserFunction):
        return None
    chooser = LOSSES[entry.name].select
    return None if chooser is None else chooser(entry, batch)


def token_loss(entry: Entry, inputs: LossInputs) -> TokenLoss:
    """Apply the entry's loss and w; whatever stands outside the mask has neither value nor gradient."""
    definition = _users(entry) if isinstance(entry, UserFunction) else LOSSES[entry.name]
    loss = definition.values(entry, inputs)
    values_BT = masked(loss.values_BT, inputs.mask_BT)
    if definition.weight is not None:
        values_BT = values_BT * masked(definition.weight(inputs).expand_as(values_BT), inputs.mask_BT)
    return TokenLoss(values_BT, {name: flag & inputs.mask_BT for name, flag in loss.flags.items()})


def _users(entry: UserFunction) -> Loss:
    """A user's function as a definition. Its values are multiplied by w unless its decorator said `weight=False`."""

    def values(_: Entry, inputs: LossInputs) -> TokenLoss:
        fields = ("log_probs_BT", "proximal_BT", "behaviour_BT", "advantages_BT", "weights_BT")
        # 0 where the mask is False: a function that does not look at the mask would else carry a NaN there into its gradient
        clean = {name: masked(getattr(inputs, name), inputs.mask_BT) for name in fields}
        found = call("loss", entry, replace(inputs, **clean))
        loss = TokenLoss(found) if isinstance(found, torch.Tensor) else found
        if not isinstance(loss, TokenLoss) or loss.values_BT.shape != inputs.mask_BT.shape:
            got = f"shape {tuple(loss.values_BT.shape)}" if isinstance(loss, TokenLoss) else type(found).__name__
            raise UserError(
                f"a loss function returns a tensor [B, T] {tuple(inputs.mask_BT.shape)} or a TokenLoss, but {entry.name} "
                f"returned {got}: return the loss of each token, before any mean"
            )
        return loss

    return Loss(values, weight=token_weight if needs_of("loss", entry).weight else None)


__all__ = ["LOSSES", "Loss", "LossInputs", "MiniBatch", "TokenLoss", "loss_needs", "select", "token_loss"]
