"""Importance corrections: the weight of a token that another policy sampled. w = sg exp(lp_prox − lp_behave); for a loss
without a ratio sg exp(lp − lp_behave).

    inputs.py   what a correction is given: ratios of tokens, segments, responses      presets.py   every correction by its name

Weights carry no gradient. Weighting leaves the mask as it is; only corrections that drop narrow it, and with it the denominator
(`denominator: all` keeps that). Responses are corrected one by one, except for `batch_normalize` and that denominator, which
count over the whole mini-batch: where `needs.mini_batch` is True, correct the whole mini-batch at once, before the first backward
pass, and give each micro-batch its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from asyncrl.algorithms.corrections import presets
from asyncrl.algorithms.corrections.inputs import Corrected, CorrectionInputs
from asyncrl.algorithms.custom import call
from asyncrl.algorithms.masking import masked
from asyncrl.config.entries import Correcting, Entry, General, NoCorrection, UserFunction, Veto, Weighting
from asyncrl.errors import UserError

CORRECTIONS: dict[str, Callable[[Any, CorrectionInputs], Corrected]] = {
    "none": presets.none,
    "token_tis": presets.token_tis,
    "staleness_tis": presets.staleness_tis,
    "segment_tis": presets.segment_tis,
    "seq_tis": presets.seq_tis,
    "token_icepop": presets.token_icepop,
    "seq_mis": presets.seq_mis,
    "geo_mis": presets.geo_mis,
    "geo_mis_token_tis": presets.geo_mis_token_tis,
    "geo_mis_seq_tis": presets.geo_mis_seq_tis,
    "k3_mask": presets.k3_mask,
    "k3_mask_token_tis": presets.k3_mask_token_tis,
    "k3_mask_seq_tis": presets.k3_mask_seq_tis,
    "veto": presets.veto,
    "general": presets.general,
}
"""Name of the entry to its function."""


def correct(entry: Entry, inputs: CorrectionInputs) -> Corrected:
    """Apply the entry's correction and veto. Weights are 0 outside the mask that is left (1 for `none`, which weighs nothing)."""
    corrected = _users(entry, inputs) if isinstance(entry, UserFunction) else CORRECTIONS[entry.name](entry, inputs)
    if isinstance(entry, NoCorrection):
        return corrected
    floor = entry.floor if isinstance(entry, Veto) else entry.veto if isinstance(entry, Weighting) else None
    if floor is not None:
        corrected = _vetoed(corrected, inputs, floor)
    weights_BT = masked(corrected.weights_BT, corrected.mask_BT)
    if isinstance(entry, General) and entry.batch_normalize:
        mean = weights_BT.double().sum() / corrected.mask_BT.sum().clamp(min=1)
        weights_BT = torch.where(mean > 0, weights_BT / mean, weights_BT).to(weights_BT.dtype)
    return replace(corrected, weights_BT=weights_BT)


def denominator_mask(entry: Entry, mask_BT: torch.Tensor, corrected: Corrected) -> torch.Tensor:
    """The tokens that the loss is a mean of: those that stay, or all of `mask_BT` under `denominator: all`."""
    return mask_BT if isinstance(entry, Correcting) and entry.denominator == "all" else corrected.mask_BT


def _vetoed(corrected: Corrected, inputs: CorrectionInputs, bound: float) -> Corrected:
    vetoed_B1 = ((inputs.ratio_BT < bound) & inputs.mask_BT).any(1, keepdim=True)
    flags = {**corrected.flags, "vetoed": vetoed_B1 & inputs.mask_BT}
    return Corrected(corrected.weights_BT, corrected.mask_BT & ~vetoed_B1, flags)


def _users(entry: UserFunction, inputs: CorrectionInputs) -> Corrected:
    found = call("correction", entry, inputs)
    corrected = Corrected(found, inputs.mask_BT) if isinstance(found, torch.Tensor) else found
    if not isinstance(corrected, Corrected) or corrected.weights_BT.shape != inputs.mask_BT.shape:
        got = f"shape {tuple(corrected.weights_BT.shape)}" if isinstance(corrected, Corrected) else type(found).__name__
        raise UserError(
            f"a correction function returns weights [B, T] {tuple(inputs.mask_BT.shape)} or a Corrected, but {entry.name} "
            f"returned {got}: return one weight for each token"
        )
    weights_BT = corrected.weights_BT.detach()
    return replace(corrected, weights_BT=weights_BT, mask_BT=corrected.mask_BT & inputs.mask_BT)


__all__ = ["CORRECTIONS", "Corrected", "CorrectionInputs", "correct", "denominator_mask"]
