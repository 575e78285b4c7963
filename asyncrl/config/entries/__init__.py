"""The named entries of the `algorithm` section: each a name with its own parameters and defaults (ALGORITHMS).

    base.py         Entry, and what an entry may need of a run
    advantages.py   estimators        losses.py       policy losses
    corrections.py  weights, drops    divergences.py  KL and its coefficient

A new estimator, loss or correction is one class here and one function in `asyncrl.algorithms`. Names whose part of the engine is
not built yet stand in `asyncrl.config.built`.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Discriminator, Tag

from asyncrl.config.entries.advantages import (
    Distillation,
    Gae,
    Gdpo,
    GpgAdvantage,
    Grpo,
    GrpoPassk,
    Opo,
    OptimalTokenBaseline,
    ReinforcePp,
    ReinforcePpBaseline,
    Remax,
    Rloo,
    TirOptimalTokenBaseline,
    UserAdvantage,
)
from asyncrl.config.entries.base import Aggregation, Entry, Needs, UserFunction, is_users
from asyncrl.config.entries.corrections import (
    Correcting,
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
    UserCorrection,
    Veto,
    Weighting,
)
from asyncrl.config.entries.divergences import AdaptiveKl, Kl, KlEstimator
from asyncrl.config.entries.losses import (
    Cispo,
    ClipCov,
    DppoKl,
    DppoTv,
    Dro,
    Gmpo,
    GpgLoss,
    Gspo,
    KlCov,
    M2po,
    PolicyLoss,
    PpoClip,
    Reinforce,
    Sapo,
    Topr,
    UserLoss,
)

USERS = "pkg.mod:fn"
"""The tag of a user's function, whatever its name."""


def _entry(default: str) -> BeforeValidator:
    """`rloo` is short for `{name: rloo}`, and a mapping without a name means the default entry."""

    def widen(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict):
            return {"name": default, **value}
        return value

    return BeforeValidator(widen)


def _by_name() -> Discriminator:
    """Which entry a value is: its name, or that of any user's function."""

    def tag(value: Any) -> Any:
        name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
        return USERS if is_users(name) else name if isinstance(name, str) else None

    return Discriminator(tag)


Advantage = Annotated[
    Annotated[Grpo, Tag("grpo")]
    | Annotated[Rloo, Tag("rloo")]
    | Annotated[ReinforcePp, Tag("reinforce_pp")]
    | Annotated[ReinforcePpBaseline, Tag("reinforce_pp_baseline")]
    | Annotated[Remax, Tag("remax")]
    | Annotated[Opo, Tag("opo")]
    | Annotated[GpgAdvantage, Tag("gpg")]
    | Annotated[GrpoPassk, Tag("grpo_passk")]
    | Annotated[Gdpo, Tag("gdpo")]
    | Annotated[Gae, Tag("gae")]
    | Annotated[OptimalTokenBaseline, Tag("optimal_token_baseline")]
    | Annotated[TirOptimalTokenBaseline, Tag("tir_optimal_token_baseline")]
    | Annotated[Distillation, Tag("distillation")]
    | Annotated[UserAdvantage, Tag(USERS)],
    _by_name(),
    _entry("grpo"),
]
Loss = Annotated[
    Annotated[PpoClip, Tag("ppo_clip")]
    | Annotated[Cispo, Tag("cispo")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Gmpo, Tag("gmpo")]
    | Annotated[Sapo, Tag("sapo")]
    | Annotated[DppoTv, Tag("dppo_tv")]
    | Annotated[DppoKl, Tag("dppo_kl")]
    | Annotated[ClipCov, Tag("clip_cov")]
    | Annotated[KlCov, Tag("kl_cov")]
    | Annotated[Dro, Tag("dro")]
    | Annotated[Topr, Tag("topr")]
    | Annotated[M2po, Tag("m2po")]
    | Annotated[Reinforce, Tag("reinforce")]
    | Annotated[GpgLoss, Tag("gpg")]
    | Annotated[UserLoss, Tag(USERS)],
    _by_name(),
    _entry("ppo_clip"),
]
Correction = Annotated[
    Annotated[NoCorrection, Tag("none")]
    | Annotated[TokenTis, Tag("token_tis")]
    | Annotated[StalenessTis, Tag("staleness_tis")]
    | Annotated[SegmentTis, Tag("segment_tis")]
    | Annotated[SeqTis, Tag("seq_tis")]
    | Annotated[TokenIcepop, Tag("token_icepop")]
    | Annotated[SeqMis, Tag("seq_mis")]
    | Annotated[GeoMis, Tag("geo_mis")]
    | Annotated[GeoMisTokenTis, Tag("geo_mis_token_tis")]
    | Annotated[GeoMisSeqTis, Tag("geo_mis_seq_tis")]
    | Annotated[K3Mask, Tag("k3_mask")]
    | Annotated[K3MaskTokenTis, Tag("k3_mask_token_tis")]
    | Annotated[K3MaskSeqTis, Tag("k3_mask_seq_tis")]
    | Annotated[Veto, Tag("veto")]
    | Annotated[General, Tag("general")]
    | Annotated[UserCorrection, Tag(USERS)],
    _by_name(),
    _entry("staleness_tis"),
]

KlTerm = Annotated[Kl | None, _entry("k3")]


def entries_of(kind: Any) -> dict[str, type[Entry]]:
    """Name to class of each built-in entry of `Advantage`, `Loss` or `Correction`."""
    classes = [get_args(member)[0] for member in get_args(get_args(kind)[0])]
    return {cls.model_fields["name"].default: cls for cls in classes if not issubclass(cls, UserFunction)}


__all__ = [
    "AdaptiveKl", "Advantage", "Aggregation", "Cispo", "ClipCov", "Correcting", "Correction",
    "Distillation", "DppoKl", "DppoTv", "Dro", "Entry", "Gae", "Gdpo",
    "General", "GeoMis", "GeoMisSeqTis", "GeoMisTokenTis", "Gmpo", "GpgAdvantage", "GpgLoss", "Grpo", "GrpoPassk", "Gspo", "K3Mask",
    "K3MaskSeqTis", "K3MaskTokenTis", "Kl", "KlCov", "KlEstimator", "KlTerm", "Loss", "M2po", "Needs", "NoCorrection", "Opo", "OptimalTokenBaseline",
    "PolicyLoss", "PpoClip", "Reinforce", "ReinforcePp", "ReinforcePpBaseline", "Rejection", "Remax", "Rloo", "Sapo", "SegmentTis",
    "SeqMis", "SeqTis", "StalenessTis", "TirOptimalTokenBaseline", "TokenIcepop", "TokenTis", "Topr", "UserAdvantage",
    "UserCorrection", "UserFunction", "UserLoss", "Veto", "Weighting", "entries_of", "is_users",
]  # fmt: skip
