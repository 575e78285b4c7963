"""Parameters and defaults of every importance correction. w = π_prox/π_behave of a token; bounds are on ratios of that kind, never
on their inverse."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.config.entries.base import Entry, Needs, UserFunction

WEIGHTING = Needs(proximals=("recompute", "loglinear"))
BY_STALENESS = replace(WEIGHTING, staleness=True)
DROPPING = Needs(drops=True, mini_batch=True, proximals=("recompute",))
DENOMINATOR = "What the loss is a mean of: the tokens that stay, or all, as if the dropped ones had a loss of 0."
VETO = "Drop a response with any token's ratio below this, such as 1.0e-4; null is off."
CAP, SEQUENCE_CAP = "Upper bound of each token's weight.", "Upper bound of the response's weight."
GEO_LOW, GEO_HIGH = "Smallest geometric mean of a response's ratios that stays.", "Largest one that stays."
K3 = "Largest mean w − 1 − log w of a response that stays."
Denominator = Literal["kept", "all"]


class Correcting(Entry):
    """Any correction but `none`."""

    denominator: Denominator = Field("kept", description=DENOMINATOR)


class Weighting(Correcting):
    """A weight of each token, and what it may drop; a veto beside."""

    requires: ClassVar[Needs] = WEIGHTING
    veto: float | None = Field(None, gt=0, lt=1, description=VETO)

    @property
    def needs(self) -> Needs:
        return _dropping(self.requires) if self.veto is not None else self.requires


def _dropping(needs: Needs) -> Needs:
    return replace(needs, drops=True, mini_batch=True, proximals=DROPPING.proximals)


class NoCorrection(Entry):
    name: Literal["none"] = Field("none", description="No weight and no mask.")


class TokenTis(Weighting):
    name: Literal["token_tis"] = Field("token_tis", description="Each token's ratio to the behaviour policy, cut off at a cap.")
    cap: float = Field(2.0, gt=0, description=CAP)


class StalenessTis(Weighting):
    requires: ClassVar[Needs] = BY_STALENESS
    name: Literal["staleness_tis"] = Field(
        "staleness_tis", description="As token_tis, with a cap that tightens with the token's own staleness."
    )
    cap: float = Field(2.0, ge=1, description="Upper bound of the weight of a fresh token.")
    decay: float = Field(
        0.5, ge=0, le=1, description="The bound's excess over 1 shrinks by this factor per version of staleness."
    )


class SegmentTis(Weighting):
    requires: ClassVar[Needs] = BY_STALENESS
    name: Literal["segment_tis"] = Field(
        "segment_tis", description="The product of ratios over each run of tokens of one version, cut off at a cap."
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of the segment's weight.")


class SeqTis(Weighting):
    name: Literal["seq_tis"] = Field("seq_tis", description="The product of a response's ratios, cut off at a cap.")
    cap: float = Field(2.0, gt=0, description=SEQUENCE_CAP)


class TokenIcepop(Weighting):
    name: Literal["token_icepop"] = Field(
        "token_icepop", description="Each token's ratio inside a band, and weight 0 outside it."
    )
    low: float = Field(0.5, ge=0, description="Smallest ratio that keeps its weight.")
    high: float = Field(5.0, gt=0, description="Largest ratio that keeps its weight.")


class SeqMis(Weighting):
    requires: ClassVar[Needs] = DROPPING
    name: Literal["seq_mis"] = Field(
        "seq_mis", description="Drop a response whose product of ratios is outside a band; else seq_tis."
    )
    low: float = Field(0.5, ge=0, description="Smallest product that stays.")
    high: float = Field(2.0, gt=0, description="Largest product that stays.")
    cap: float = Field(2.0, gt=0, description=SEQUENCE_CAP)


class GeoMis(Weighting):
    requires: ClassVar[Needs] = DROPPING
    name: Literal["geo_mis"] = Field(
        "geo_mis",
        description="Drop a response whose geometric mean of ratios is outside a narrow band; for numeric mismatch alone.",
    )
    low: float = Field(0.999, ge=0, description=GEO_LOW)
    high: float = Field(1.001, gt=0, description=GEO_HIGH)


class GeoMisTokenTis(GeoMis):
    name: Literal["geo_mis_token_tis"] = Field("geo_mis_token_tis", description="Drop as geo_mis, weight as token_tis.")  # type: ignore[assignment]
    cap: float = Field(2.0, gt=0, description=CAP)


class GeoMisSeqTis(GeoMis):
    name: Literal["geo_mis_seq_tis"] = Field("geo_mis_seq_tis", description="Drop as geo_mis, weight as seq_tis.")  # type: ignore[assignment]
    cap: float = Field(2.0, gt=0, description=SEQUENCE_CAP)


class K3Mask(Weighting):
    requires: ClassVar[Needs] = DROPPING
    name: Literal["k3_mask"] = Field("k3_mask", description="Drop a response whose mean k3 divergence is above a bound.")
    high: float = Field(0.01, gt=0, description=K3)


class K3MaskTokenTis(K3Mask):
    name: Literal["k3_mask_token_tis"] = Field("k3_mask_token_tis", description="Drop as k3_mask, weight as token_tis.")  # type: ignore[assignment]
    cap: float = Field(2.0, gt=0, description=CAP)


class K3MaskSeqTis(K3Mask):
    name: Literal["k3_mask_seq_tis"] = Field("k3_mask_seq_tis", description="Drop as k3_mask, weight as seq_tis.")  # type: ignore[assignment]
    cap: float = Field(2.0, gt=0, description=SEQUENCE_CAP)


class Veto(Correcting):
    requires: ClassVar[Needs] = DROPPING
    name: Literal["veto"] = Field(
        "veto", description="Drop a response with any ratio far below 1; no weight. As the parameter `veto`, beside any other."
    )
    floor: float = Field(1e-4, gt=0, lt=1, description="Drop a response with any token's ratio below this.")


class Rejection(BaseModel):
    """One reason to drop: a figure outside its bounds. `by: token` drops that token, any other the whole response.

    With w of each token: k1 is the ratio itself (token: w; seq_sum: Πw; seq_mean: (Πw)^(1/len)), k2 is (log w)²/2, k3 is
    w − 1 − log w; seq_sum, seq_mean and seq_max are over the response's trainable tokens.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    by: Literal["token", "seq_sum", "seq_mean", "seq_max"] = Field(description="What is judged: each token, or its response.")
    figure: Literal["k1", "k2", "k3"] = Field(description="By which figure: k1 the ratio, k2 and k3 divergences.")
    low: float | None = Field(None, ge=0, description="Smallest value that stays; null is no bound.")
    high: float | None = Field(None, gt=0, description="Largest value that stays; null is no bound.")


class General(Weighting):
    name: Literal["general"] = Field("general", description="The general form: a level, a treatment, and reasons to drop.")
    level: Literal["token", "segment", "sequence", "geometric"] = Field(
        "token",
        description="Whose ratio is the weight: a token's, or the product over its segment or response, or its geometric mean.",
    )
    treatment: Literal["truncate", "band"] = Field(
        "truncate", description="A ratio above cap becomes cap, or a ratio outside low and high becomes 0."
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of the weight under truncate.")
    low: float = Field(0.5, ge=0, description="Smallest ratio that keeps its weight under band.")
    high: float = Field(5.0, gt=0, description="Largest ratio that keeps its weight under band.")
    reject: list[Rejection] = Field(default_factory=list, description="Reasons to drop; any one is enough.")
    batch_normalize: bool = Field(False, description="Divide weights by their mean over the mini-batch's trainable tokens.")

    @property
    def needs(self) -> Needs:
        needs = BY_STALENESS if self.level == "segment" else self.requires
        if self.veto is not None or self.reject:
            return _dropping(needs)
        return replace(needs, mini_batch=True, proximals=DROPPING.proximals) if self.batch_normalize else needs


class UserCorrection(UserFunction):
    """fn(inputs: CorrectionInputs, **parameters) → weights [B, T] or Corrected. One that narrows the mask leaves the denominator."""

    requires: ClassVar[Needs] = BY_STALENESS
