"""Algorithms: advantages, policy losses and importance corrections as pure functions on tensors. Imports config's entries, errors
(and torch, on first use of what is below).

    rewards, mask ──advantages/──▶ A ─┐
    log-probs ──────proximal.py──▶ lp_prox ──corrections/──▶ w ─┼──losses/──▶ token values ──aggregation.py──▶ loss
    log-probs ──────divergence.py──▶ KL                         └──reports.py──▶ metrics, in all and by staleness

mini_batch.py judges what only a whole mini-batch can tell (drops, selections, denominators), before it is cut; shaping.py has
what a response's length costs; masking.py is the arithmetic under a mask.

Each kind has one registry, keyed by the `name` of its entry in `asyncrl.config.entries`: ADVANTAGES, LOSSES, CORRECTIONS,
PROXIMALS, ESTIMATORS. A further entry is a parameter class there and a function here. `asyncrl algorithms` prints them all.

From Python, the same code that the trainer runs: `advantage`, `gae`, `policy_loss`, `correction`, `kl` (public.py), and
`register_advantage`, `register_loss`, `register_correction` for functions of one's own (custom.py).

Shapes: B responses, T positions of the longest response (right-padded); suffix `_B`, `_BT`. A mask is bool; what stands where
it is False (NaN, inf) changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.algorithms.naming import register_advantage, register_correction, register_loss
    from asyncrl.algorithms.public import advantage, correction, gae, kl, policy_loss

_HOMES = {
    "advantage": "public",
    "gae": "public",
    "policy_loss": "public",
    "correction": "public",
    "kl": "public",
    "register_advantage": "naming",
    "register_loss": "naming",
    "register_correction": "naming",
}
__all__ = [
    "advantage", "correction", "gae", "kl", "policy_loss", "register_advantage", "register_correction", "register_loss",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"asyncrl.algorithms.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'asyncrl.algorithms' has no attribute {name!r}")
