"""What a correction is given and gives back, and the ratios of tokens, segments and responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from asyncrl.algorithms.masking import bounded, clamped_log_ratio, response_mean


@dataclass(frozen=True)
class CorrectionInputs:
    """[B, T], a row a whole response. log_ratio_BT: log w before any treatment, 0 outside the mask; staleness_BT int64 ≥ 0;
    mask_BT bool.

    The ratios below are [B, T] or [B, 1]; log-ratios and their sums are clamped to ±20.
    """

    log_ratio_BT: torch.Tensor
    staleness_BT: torch.Tensor
    mask_BT: torch.Tensor

    @classmethod
    def of(
        cls, proximal_BT: torch.Tensor, behaviour_BT: torch.Tensor, staleness_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> CorrectionInputs:
        """log w = sg clamp(lp_prox − lp_behave, ±20)."""
        log_ratio_BT = clamped_log_ratio(proximal_BT.detach(), behaviour_BT.detach(), mask_BT)
        return cls(log_ratio_BT, staleness_BT, mask_BT)

    @property
    def ratio_BT(self) -> torch.Tensor:
        """w of each token, 1 outside the mask."""
        return self.log_ratio_BT.exp()

    @property
    def sequence_B1(self) -> torch.Tensor:
        """Π w over the response's trainable tokens."""
        return bounded(self.log_ratio_BT.sum(1, keepdim=True)).exp()

    @property
    def geometric_B1(self) -> torch.Tensor:
        """(Π w)^(1/len)."""
        return response_mean(self.log_ratio_BT, self.mask_BT).exp()

    @property
    def segment_BT(self) -> torch.Tensor:
        """Π w over the token's segment: a run of trainable tokens of one version, masked ones between them skipped."""
        segments_BT = self._segments()
        sums_BT = torch.zeros_like(self.log_ratio_BT).scatter_add(1, segments_BT, self.log_ratio_BT)
        return bounded(sums_BT).exp().gather(1, segments_BT)

    @property
    def k2_BT(self) -> torch.Tensor:
        """(log w)²/2, an estimate of KL(behave‖prox)."""
        return self.log_ratio_BT.square() / 2

    @property
    def k3_BT(self) -> torch.Tensor:
        """w − 1 − log w, another."""
        return torch.expm1(self.log_ratio_BT) - self.log_ratio_BT

    def _segments(self) -> torch.Tensor:
        """int64[B, T]: index of the token's segment in its response; of a masked token that of the last one before it."""
        positions_T = torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device)
        last_BT = torch.where(self.mask_BT, positions_T, -1).cummax(1).values
        before_BT = torch.nn.functional.pad(last_BT, (1, 0), value=-1)[:, :-1]
        staleness_before_BT = self.staleness_BT.gather(1, before_BT.clamp(min=0))
        begins_BT = self.mask_BT & ((before_BT < 0) | (self.staleness_BT != staleness_before_BT))
        return (begins_BT.cumsum(1) - 1).clamp(min=0)


@dataclass(frozen=True)
class Corrected:
    """weights_BT ≥ 0; mask_BT, narrower than the input's only for corrections that drop; flags: what befell each token
    ("truncated", "banded", "dropped", "vetoed")."""

    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    flags: Mapping[str, torch.Tensor] = field(default_factory=dict)
