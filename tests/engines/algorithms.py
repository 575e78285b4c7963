"""Every loss, aggregation and correction that the engine runs, with bounds that random batches lie on both sides of."""

from __future__ import annotations

from typing import Any, get_args

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.losses import LOSSES, loss_needs
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.built import NOT_BUILT
from asyncrl.config.entries import KlEstimator

LOSS_PARAMETERS: dict[str, dict[str, Any]] = {
    "dro": {"beta": 0.1},
    "clip_cov": {"low": -5.0, "high": 5.0, "ratio": 0.1},
    "kl_cov": {"ratio": 0.1},
    "m2po": {"tau": 0.02},
    "cispo": {"cap": 1.2},
    "dppo_tv": {"delta": 0.01},
    "dppo_kl": {"delta": 0.001},
}
CORRECTION_PARAMETERS: dict[str, dict[str, Any]] = {
    "geo_mis": {"low": 0.5, "high": 1.2},
    "geo_mis_token_tis": {"low": 0.5, "high": 1.2},
    "geo_mis_seq_tis": {"low": 0.5, "high": 1.2},
    "token_icepop": {"low": 0.9, "high": 1.2},
    "k3_mask": {"high": 0.03},
    "k3_mask_token_tis": {"high": 0.05},
    "k3_mask_seq_tis": {"high": 0.05, "denominator": "all"},
    "veto": {"floor": 0.6},
    "general": {"level": "segment", "reject": [{"by": "seq_max", "figure": "k2", "high": 0.5}], "batch_normalize": True},
}


def _algorithm(**parts: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(parts)


def _loss(name: str, **more: Any) -> AlgorithmConfig:
    """Against the behaviour policy where it may be, so that its ratio is not 1."""
    loss = {"name": name, **LOSS_PARAMETERS.get(name, {}), **more}
    needs = loss_needs(_algorithm(loss=loss, correction="none").loss)
    proximal = "behave" if "behave" in needs.proximals and needs.anchor != "none" else "recompute"
    return _algorithm(loss=loss, correction="none", proximal=proximal)


ALGORITHMS: dict[str, AlgorithmConfig] = (
    {name: _loss(name) for name in LOSSES}
    | {name: _loss("ppo_clip", aggregation=name) for name in AGGREGATIONS}
    | {name: _algorithm(correction={"name": name, **CORRECTION_PARAMETERS.get(name, {})}) for name in CORRECTIONS}
    | {name: _algorithm(advantage=name) for name in ADVANTAGES if name not in (*NOT_BUILT["algorithm.advantage"], "gae")}
    | {"several at once": _algorithm(loss={"name": "clip_cov", **LOSS_PARAMETERS["clip_cov"]}, correction={"name": "seq_mis"})}
)

BETA, ENTROPY = 0.7, 0.3
"""Large enough that their gradients stand beside the policy loss's."""
KL_NAMES = get_args(KlEstimator)


def _kl(name: str, where: str = "loss", **more: Any) -> AlgorithmConfig:
    return _algorithm(kl={"name": name, "coefficient": BETA, "where": where}, **more)


REGULARISED: dict[str, AlgorithmConfig] = (
    {f"kl {name}": _kl(name) for name in KL_NAMES}
    | {f"kl {name} in the reward": _kl(name, "reward") for name in KL_NAMES if not name.endswith("+")}
    | {
        f"kl in the reward, {name}": _kl("k1", "reward", advantage=name)
        for name in ("reinforce_pp", "rloo", "optimal_token_baseline")
    }
    | {f"kl, {name}": _kl("k3", loss={"name": "ppo_clip", "aggregation": name}) for name in AGGREGATIONS}
    | {
        "entropy": _algorithm(entropy_coefficient=ENTROPY),
        "entropy, gspo": _algorithm(entropy_coefficient=ENTROPY, loss="gspo"),
        "both, with drops": _kl(
            "k3", entropy_coefficient=ENTROPY, correction={"name": "geo_mis", **CORRECTION_PARAMETERS["geo_mis"]}
        ),
        "both, behave": _kl("k2", entropy_coefficient=ENTROPY, proximal="behave", correction="none"),
    }
)
"""With a divergence from a reference, for an engine that has one of its own weights, or an entropy bonus."""
