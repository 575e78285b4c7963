"""Importance corrections in plain numpy, float64, one response at a time: written from the formulas, not from the code.

Each returns (weights [B, T], kept bool [B, T]); weights are 0 where not kept.
"""

from __future__ import annotations

import numpy as np


def ratios(prox, beh):
    return np.exp(np.clip(prox - beh, -20, 20))


def product(w):
    return np.exp(np.clip(np.log(w).sum(), -20, 20))


def geometric(w):
    return np.exp(np.log(w).mean()) if len(w) else 1.0


def k3(w):
    return w - 1 - np.log(w)


def per_response(w, m, judge):
    """`judge(ratios of the trainable tokens)` → (weights of them, whether the response stays)."""
    weights, kept = np.zeros(m.shape), np.zeros(m.shape, dtype=bool)
    for b in range(len(m)):
        if m[b].any():
            values, stays = judge(w[b][m[b]])
            kept[b] = m[b] & stays
            weights[b][m[b]] = np.where(stays, values, 0.0)
    return weights, kept


def token_tis(w, d, m, cap=2.0):
    return np.where(m, np.minimum(w, cap), 0.0), m


def staleness_tis(w, d, m, cap=2.0, decay=0.5):
    return np.where(m, np.minimum(w, 1 + (cap - 1) * decay ** d.astype(float)), 0.0), m


def segment_tis(w, d, m, cap=2.0):
    out = np.zeros(m.shape)
    for b in range(len(m)):
        run, version = [], None
        for t in [*np.flatnonzero(m[b]), None]:
            if t is None or d[b, t] != version:
                for u in run:
                    out[b, u] = min(product(w[b][run]), cap)
                run, version = [], None if t is None else d[b, t]
            run.append(t)
    return out, m


def seq_tis(w, d, m, cap=2.0):
    return per_response(w, m, lambda x: (min(product(x), cap), True))


def token_icepop(w, d, m, low=0.5, high=5.0):
    return np.where(m & (w >= low) & (w <= high), w, 0.0), m


def seq_mis(w, d, m, low=0.5, high=2.0, cap=2.0):
    return per_response(w, m, lambda x: (min(product(x), cap), low <= product(x) <= high))


def geo_mis(w, d, m, low=0.999, high=1.001):
    return per_response(w, m, lambda x: (1.0, low <= geometric(x) <= high))


def geo_mis_token_tis(w, d, m, low=0.999, high=1.001, cap=2.0):
    return per_response(w, m, lambda x: (np.minimum(x, cap), low <= geometric(x) <= high))


def geo_mis_seq_tis(w, d, m, low=0.999, high=1.001, cap=2.0):
    return per_response(w, m, lambda x: (min(product(x), cap), low <= geometric(x) <= high))


def k3_mask(w, d, m, high=0.01):
    return per_response(w, m, lambda x: (1.0, k3(x).mean() <= high))


def k3_mask_token_tis(w, d, m, high=0.01, cap=2.0):
    return per_response(w, m, lambda x: (np.minimum(x, cap), k3(x).mean() <= high))


def k3_mask_seq_tis(w, d, m, high=0.01, cap=2.0):
    return per_response(w, m, lambda x: (min(product(x), cap), k3(x).mean() <= high))


def veto(w, d, m, floor=1e-4):
    return per_response(w, m, lambda x: (1.0, x.min() >= floor))


def with_veto(weights, kept, w, m, bound):
    alive = per_response(w, m, lambda x: (1.0, x.min() >= bound))[1]
    return np.where(alive, weights, 0.0), kept & alive


def general(w, d, m, level="token", treatment="truncate", cap=2.0, low=0.5, high=5.0, reject=(), batch_normalize=False):
    if level == "segment":
        ratio = segment_tis(w, d, m, cap=np.inf)[0]
    else:
        judge = {"token": lambda x: x, "sequence": product, "geometric": geometric}[level]
        ratio = per_response(w, m, lambda x: (judge(x), True))[0]
    weights = np.minimum(ratio, cap) if treatment == "truncate" else np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    kept = m.copy()
    for rule in reject:
        kept &= accepted(w, m, **rule)
    weights = np.where(kept, weights, 0.0)
    if batch_normalize and kept.any() and weights[kept].mean() > 0:
        weights = weights / weights[kept].mean()
    return weights, kept


def accepted(w, m, by, figure, low=None, high=None):
    low, high = -np.inf if low is None else low, np.inf if high is None else high
    figures = {"k1": lambda x: x, "k2": lambda x: np.log(x) ** 2 / 2, "k3": k3}[figure]
    if by == "token":
        value = figures(w)
        return m & (value >= low) & (value <= high)
    if figure == "k1":
        judge = {"seq_sum": product, "seq_mean": geometric}[by]
    else:
        judge = {
            "seq_sum": lambda x: figures(x).sum(),
            "seq_mean": lambda x: figures(x).mean(),
            "seq_max": lambda x: figures(x).max(),
        }[by]
    return per_response(w, m, lambda x: (1.0, low <= judge(x) <= high))[1]
