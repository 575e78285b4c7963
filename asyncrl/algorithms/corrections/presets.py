"""Every correction by its name. `veto` and `denominator` are the same for all, and applied by `correct`."""

from __future__ import annotations

import torch

from asyncrl.algorithms.corrections.inputs import Corrected, CorrectionInputs
from asyncrl.algorithms.masking import response_mean
from asyncrl.config.entries import (
    General,
    GeoMis,
    GeoMisSeqTis,
    GeoMisTokenTis,
    K3Mask,
    K3MaskSeqTis,
    K3MaskTokenTis,
    NoCorrection,
    Rejection,
    SegmentTis,
    SeqMis,
    SeqTis,
    StalenessTis,
    TokenIcepop,
    TokenTis,
    Veto,
)


def none(entry: NoCorrection, inputs: CorrectionInputs) -> Corrected:
    """w = 1, and the mask as it is."""
    return Corrected(torch.ones_like(inputs.ratio_BT), inputs.mask_BT)


def token_tis(entry: TokenTis, inputs: CorrectionInputs) -> Corrected:
    """min(w, cap) per token.

    Truncated importance sampling, Ionides 2008; between sampler and trainer, fengyao.notion.site/off-policy-rl.
    """
    return _truncated(inputs.ratio_BT, entry.cap, inputs.mask_BT)


def staleness_tis(entry: StalenessTis, inputs: CorrectionInputs) -> Corrected:
    """min(w, c(d)) per token, c(d) = 1 + (cap − 1)·decay^d, d the token's staleness in versions.

    asyncrl's own: the older a token, the less its ratio is trusted to speak for it.
    """
    decay = torch.as_tensor(entry.decay, dtype=inputs.ratio_BT.dtype, device=inputs.ratio_BT.device)
    return _truncated(inputs.ratio_BT, 1 + (entry.cap - 1) * decay.pow(inputs.staleness_BT), inputs.mask_BT)


def segment_tis(entry: SegmentTis, inputs: CorrectionInputs) -> Corrected:
    """min(Π w, cap), Π over a run of tokens of one version; the whole segment has that weight.

    Between token_tis and seq_tis: within a segment one policy sampled, so that its product is that policy's own ratio.
    """
    return _truncated(inputs.segment_BT, entry.cap, inputs.mask_BT)


def seq_tis(entry: SeqTis, inputs: CorrectionInputs) -> Corrected:
    """min(Π w, cap), Π over the response, whose tokens all have that weight.

    Sequence-level truncated importance sampling, richardli.xyz/rl-collapse part 3; the ratio of whole trajectories, Precup 2000.
    """
    return _truncated(inputs.sequence_B1, entry.cap, inputs.mask_BT)


def token_icepop(entry: TokenIcepop, inputs: CorrectionInputs) -> Corrected:
    """w where low ≤ w ≤ high, else weight 0; the mask stays.

    IcePop, of Ring-1T, arXiv 2510.18855 section 2.3.2.
    """
    return _banded(inputs.ratio_BT, entry.low, entry.high, inputs.mask_BT)


def seq_mis(entry: SeqMis, inputs: CorrectionInputs) -> Corrected:
    """Drop the response unless low ≤ Π w ≤ high; weight min(Π w, cap) on what stays.

    Sequence-level masked importance sampling, richardli.xyz/rl-collapse part 3.
    """
    kept_B1 = _within(inputs.sequence_B1, entry.low, entry.high)
    return _dropped(_truncated(inputs.sequence_B1, entry.cap, inputs.mask_BT), kept_B1)


def geo_mis(entry: GeoMis, inputs: CorrectionInputs) -> Corrected:
    """Drop the response unless low ≤ (Π w)^(1/len) ≤ high; weight 1 on what stays.

    Geometric sequence masking, richardli.xyz/rl-collapse part 3. The band suits numeric mismatch of one policy: with stale tokens
    it drops nearly all.
    """
    return _dropped(_unweighted(inputs), _within(inputs.geometric_B1, entry.low, entry.high))


def geo_mis_token_tis(entry: GeoMisTokenTis, inputs: CorrectionInputs) -> Corrected:
    """Drop as geo_mis; weight min(w, cap) per token.

    Both of richardli.xyz/rl-collapse part 3: the drop judges the response, the weight each token.
    """
    kept_B1 = _within(inputs.geometric_B1, entry.low, entry.high)
    return _dropped(_truncated(inputs.ratio_BT, entry.cap, inputs.mask_BT), kept_B1)


def geo_mis_seq_tis(entry: GeoMisSeqTis, inputs: CorrectionInputs) -> Corrected:
    """Drop as geo_mis; weight min(Π w, cap).

    Both of richardli.xyz/rl-collapse part 3.
    """
    kept_B1 = _within(inputs.geometric_B1, entry.low, entry.high)
    return _dropped(_truncated(inputs.sequence_B1, entry.cap, inputs.mask_BT), kept_B1)


def k3_mask(entry: K3Mask, inputs: CorrectionInputs) -> Corrected:
    """Drop the response if mean_t (w − 1 − log w) > high; weight 1 on what stays.

    The k3 estimate of KL(behave‖prox), joschu.net/blog/kl-approx.html, as a bound on what is trained.
    """
    return _dropped(_unweighted(inputs), _k3_kept(entry, inputs))


def k3_mask_token_tis(entry: K3MaskTokenTis, inputs: CorrectionInputs) -> Corrected:
    """Drop as k3_mask; weight min(w, cap) per token.

    The drop's estimate, joschu.net/blog/kl-approx.html; the weight, Ionides 2008.
    """
    return _dropped(_truncated(inputs.ratio_BT, entry.cap, inputs.mask_BT), _k3_kept(entry, inputs))


def k3_mask_seq_tis(entry: K3MaskSeqTis, inputs: CorrectionInputs) -> Corrected:
    """Drop as k3_mask; weight min(Π w, cap).

    The drop's estimate, joschu.net/blog/kl-approx.html; the weight, richardli.xyz/rl-collapse part 3.
    """
    return _dropped(_truncated(inputs.sequence_B1, entry.cap, inputs.mask_BT), _k3_kept(entry, inputs))


def veto(entry: Veto, inputs: CorrectionInputs) -> Corrected:
    """Drop the response when any w < floor; weight 1 on what stays. `veto: floor` on any other correction: the same drop beside
    its own weights.

    Catastrophic-token veto, richardli.xyz/rl-collapse part 3.
    """
    return _unweighted(inputs)


def general(entry: General, inputs: CorrectionInputs) -> Corrected:
    """w of the level (token w, segment Π w, sequence Π w, geometric (Π w)^(1/len)); truncate: min(w, cap), band: w in [low,
    high] or 0; then every rejection drops; `batch_normalize` divides what stays by its mean.

    The form that every preset is a case of.
    """
    levels = {"token": "ratio_BT", "segment": "segment_BT", "sequence": "sequence_B1", "geometric": "geometric_B1"}
    ratio = getattr(inputs, levels[entry.level])
    if entry.treatment == "truncate":
        weighted = _truncated(ratio, entry.cap, inputs.mask_BT)
    else:
        weighted = _banded(ratio, entry.low, entry.high, inputs.mask_BT)
    for rejection in entry.reject:
        weighted = _dropped(weighted, _accepted(rejection, inputs))
    return weighted


def _accepted(rejection: Rejection, inputs: CorrectionInputs) -> torch.Tensor:
    """Where the figure is within its bounds: [B, T] for tokens, [B, 1] for responses."""
    if rejection.figure == "k1":
        ratios = {"token": "ratio_BT", "seq_sum": "sequence_B1", "seq_mean": "geometric_B1"}
        figure = getattr(inputs, ratios[rejection.by])
    else:
        token_BT = inputs.k2_BT if rejection.figure == "k2" else inputs.k3_BT
        figure = {
            "token": lambda: token_BT,
            "seq_sum": lambda: token_BT.sum(1, keepdim=True),
            "seq_mean": lambda: response_mean(token_BT, inputs.mask_BT),
            "seq_max": lambda: token_BT.amax(1, keepdim=True) if token_BT.shape[1] else token_BT.sum(1, keepdim=True),
        }[rejection.by]()
    return _within(figure, rejection.low, rejection.high)


def _k3_kept(entry: K3Mask, inputs: CorrectionInputs) -> torch.Tensor:
    return _within(response_mean(inputs.k3_BT, inputs.mask_BT), None, entry.high)


def _within(figure: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    inside = torch.ones_like(figure, dtype=torch.bool)
    if low is not None:
        inside = inside & (figure >= low)
    return inside if high is None else inside & (figure <= high)


def _unweighted(inputs: CorrectionInputs) -> Corrected:
    return Corrected(torch.ones_like(inputs.ratio_BT), inputs.mask_BT)


def _truncated(ratio: torch.Tensor, cap: float | torch.Tensor, mask_BT: torch.Tensor) -> Corrected:
    weights = torch.minimum(ratio, cap) if isinstance(cap, torch.Tensor) else ratio.clamp(max=cap)
    return Corrected(weights.expand(mask_BT.shape), mask_BT, {"truncated": (ratio > cap) & mask_BT})


def _banded(ratio: torch.Tensor, low: float, high: float, mask_BT: torch.Tensor) -> Corrected:
    inside = _within(ratio, low, high)
    weights = torch.where(inside, ratio, torch.zeros_like(ratio))
    return Corrected(weights.expand(mask_BT.shape), mask_BT, {"banded": ~inside & mask_BT})


def _dropped(corrected: Corrected, kept: torch.Tensor) -> Corrected:
    """Narrow the mask; the flag holds all that any reason dropped."""
    mask_BT = corrected.mask_BT & kept
    before = corrected.flags.get("dropped", torch.zeros_like(mask_BT))
    return Corrected(corrected.weights_BT, mask_BT, {**corrected.flags, "dropped": before | (corrected.mask_BT & ~kept)})
