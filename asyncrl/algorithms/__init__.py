"""Algorithms: advantages, policy losses and importance corrections as pure functions on tensors. Imports config's entries, errors
(and torch).

    rewards, mask ──advantages.py──▶ A ─┐
    log-probs ──────proximal.py────▶ lp_prox ──corrections.py──▶ w ─┼──losses.py──▶ token values ──aggregation.py──▶ loss
                                                                    └──reports.py──▶ metrics, in all and by staleness

Each kind has one registry, keyed by the `name` of its entry in `asyncrl.config.entries`: ADVANTAGES, LOSSES, CORRECTIONS,
PROXIMALS. A further entry is a parameter class there and a function here.

Shapes: B responses, T positions of the longest response (right-padded); suffix `_B`, `_BT`. A mask is bool; what stands where
it is False (NaN, inf) changes nothing.
"""
