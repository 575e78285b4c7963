"""Policy losses in plain numpy, float64, written from the formulas, with gradients in closed form.

Each loss returns (values [B, T], gradient [B, T]): the gradient of the sum of a response's values with respect to each of its
log-probs, so that any aggregation is a factor per response. All are 0 outside the mask.
"""

from __future__ import annotations

import numpy as np


def log_ratio(lp, anchor):
    return np.clip(lp - anchor, -20, 20)


def moves(lp, anchor):
    """1 where the clamp lets the gradient through."""
    return (np.abs(lp - anchor) <= 20).astype(float)


def clipped(A, r, low, high):
    """(max(−A r, −A clip(r)), its derivative by r)."""
    free, bounded = -A * r, -A * np.clip(r, 1 - low, 1 + high)
    return np.maximum(free, bounded), np.where(free >= bounded, -A, 0.0)


def ppo_clip(lp, prox, beh, A, w, m, clip_low=0.2, clip_high=0.28, dual_clip=3.0):
    r = np.exp(log_ratio(lp, prox))
    value, slope = clipped(A, r, clip_low, clip_high)
    if dual_clip is not None:
        capped = (A < 0) & (value > -A * dual_clip)
        value, slope = np.where(capped, -A * dual_clip, value), np.where(capped, 0.0, slope)
    return w * value, w * slope * r * moves(lp, prox)


def cispo(lp, prox, beh, A, w, m, cap=5.0, low=None):
    factor = np.minimum(np.exp(log_ratio(lp, prox)), cap)
    if low is not None:
        factor = np.maximum(factor, low)
    return -w * factor * A * lp, -w * factor * A


def gspo(lp, prox, beh, A, w, m, clip_low=3e-4, clip_high=4e-4):
    s = np.zeros(m.shape)
    for b in range(len(m)):
        if m[b].any():
            s[b] = np.exp(log_ratio(lp, prox)[b][m[b]].mean())
    value, slope = clipped(A, s, clip_low, clip_high)
    return w * value, w * slope * s


def gmpo(lp, prox, beh, A, w, m, clip_low=0.4, clip_high=0.4):
    value, gradient = np.zeros(m.shape), np.zeros(m.shape)
    for b in range(len(m)):
        if not m[b].any():
            continue
        a, x = A[b][m[b]][0], log_ratio(lp, prox)[b]
        sign = np.sign(a)
        bounded = np.clip(x, -clip_low, clip_high)
        chosen = sign * np.minimum(sign * x, sign * bounded)
        through = np.where(sign * x <= sign * bounded, 1.0, 0.0) * moves(lp, prox)[b]
        weight = np.prod(w[b][m[b]]) ** (1 / m[b].sum())
        value[b] = -a * np.exp(chosen[m[b]].mean()) * weight
        gradient[b] = value[b] * through  # len tokens carry the value, and each moves the mean by 1/len
    return value, gradient


def sapo(lp, prox, beh, A, w, m, tau=1.0, tau_negative=1.05):
    r = np.exp(log_ratio(lp, prox))
    t = np.where(A > 0, tau, tau_negative)
    gate = 1 / (1 + np.exp(-t * (r - 1)))
    return -w * A * gate * 4 / t, -w * A * gate * (1 - gate) * 4 * r * moves(lp, prox)


def dppo_tv(lp, prox, beh, A, w, m, delta=0.15, cap=20.0):
    p, p_b = np.exp(lp), np.exp(beh)
    inside = np.where(A > 0, p - p_b <= delta, p - p_b >= -delta)
    r = np.minimum(np.exp(log_ratio(lp, beh)), cap)
    return np.where(inside, -A * r * lp, 0.0), np.where(inside, -A * r, 0.0)


def dppo_kl(lp, prox, beh, A, w, m, delta=0.05, cap=20.0):
    p, p_b = np.exp(lp), np.exp(beh)
    divergence = p_b * np.log(p_b / p) + (1 - p_b) * np.log((1 - p_b) / (1 - p))
    back = np.where(A > 0, p <= p_b, p >= p_b)
    inside = (divergence <= delta) | back
    r = np.minimum(np.exp(log_ratio(lp, beh)), cap)
    return np.where(inside, -A * r * lp, 0.0), np.where(inside, -A * r, 0.0)


def covariances(prox, A, m):
    return np.where(m, (A - A[m].mean()) * (prox - prox[m].mean()), -np.inf) if m.any() else np.full(m.shape, -np.inf)


def mix(word):
    """One step of splitmix64 on Python's own integers."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def clip_cov_selection(prox, A, m, ids, low, high, ratio, seed):
    cov, out = covariances(prox, A, m), np.zeros(m.shape, dtype=bool)
    eligible = [(b, t) for b, t in zip(*np.nonzero(m), strict=True) if low < cov[b, t] < high]
    eligible.sort(key=lambda bt: mix(mix(mix(seed) ^ (int(ids[bt[0]]) % 2**64)) ^ int(bt[1])))
    for b, t in eligible[: max(1, int(ratio * m.sum()))]:
        out[b, t] = True
    return out


def clip_cov(lp, prox, beh, A, w, m, ids, low=1.0, high=5.0, ratio=2e-4, seed=0, **clip):
    value, gradient = ppo_clip(lp, prox, beh, A, w, m, **clip)
    chosen = clip_cov_selection(prox, A, m, ids, low, high, ratio, seed)
    return np.where(chosen, 0.0, value), np.where(chosen, 0.0, gradient)


def kl_cov(lp, prox, beh, A, w, m, ratio=2e-4, coef=1.0):
    r, x = np.exp(log_ratio(lp, prox)), log_ratio(lp, prox)
    cov, chosen = covariances(prox, A, m), np.zeros(m.shape, dtype=bool)
    tokens = sorted(zip(*np.nonzero(m), strict=True), key=lambda bt: -cov[bt])
    for bt in tokens[: max(1, int(ratio * m.sum()))]:
        chosen[bt] = True
    value = -A * r + np.where(chosen, coef * np.abs(x), 0.0)
    return w * value, w * (-A * r + np.where(chosen, coef * np.sign(x), 0.0)) * moves(lp, prox)


def dro(lp, prox, beh, A, w, m, beta):
    x = log_ratio(lp, beh)
    return -(A * lp - beta / 2 * x**2), -(A - beta * x * moves(lp, beh))


def topr(lp, prox, beh, A, w, m, cap=1.0):
    factor = np.ones(m.shape)
    for b in range(len(m)):
        product = np.exp(np.clip(log_ratio(lp, beh)[b][m[b]].sum(), -20, 20))
        factor[b] = np.where(A[b] >= 0, 1.0, np.clip(product, 0, cap))
    return -A * factor * lp, -A * factor


def m2po_kept(prox, beh, m, tau):
    """Remove the largest square, one at a time, until the mean of the rest is below tau or one is left."""
    squares = {bt: log_ratio(prox, beh)[bt] ** 2 for bt in zip(*np.nonzero(m), strict=True)}
    while len(squares) > 1 and np.mean(list(squares.values())) >= tau:
        del squares[max(squares, key=squares.get)]
    kept = np.zeros(m.shape, dtype=bool)
    for bt in squares:
        kept[bt] = True
    return kept


def m2po(lp, prox, beh, A, w, m, tau=0.04):
    kept, r = m2po_kept(prox, beh, m, tau), np.exp(log_ratio(lp, beh))
    return np.where(kept, -A * r, 0.0), np.where(kept, -A * r * moves(lp, beh), 0.0)


def reinforce(lp, prox, beh, A, w, m):
    return -w * A * lp, -w * A


gpg = reinforce


def coefficients(aggregation, m, constant=None):
    """[B]: the factor of each token of a response."""
    lengths = m.sum(1)
    N, S = max(1, lengths.sum()), max(1, (lengths > 0).sum())
    constant = m.shape[1] if constant is None else constant
    factors = []
    for length in lengths:
        factors.append(
            {
                "token_mean": 1 / N,
                "token_sum": 1.0,
                "seq_mean_token_sum": 1 / S,
                "seq_mean_token_mean": 1 / S / max(1, length),
                "seq_mean_token_sum_norm": 1 / S / constant,
            }[aggregation]
        )
    return np.array(factors)


def aggregated(values, gradient, m, aggregation, constant=None):
    """(loss, gradient [B, T]) of the batch."""
    c = coefficients(aggregation, m, constant)[:, None]
    return float(np.sum(np.where(m, c * values, 0.0))), np.where(m, c * gradient, 0.0)


def kl(estimator, lp, ref):
    """(value, gradient by lp)."""
    d, through = np.clip(ref - lp, -20, 20), (np.abs(ref - lp) <= 20).astype(float)
    value, slope = {  # slope by d
        "k1": (-d, -np.ones_like(d)),
        "abs": (np.abs(d), np.sign(d)),
        "k2": (d**2 / 2, d),
        "k3": (np.minimum(np.exp(d) - 1 - d, 10.0), np.where(np.exp(d) - 1 - d <= 10, np.exp(d) - 1, 0.0)),
    }[estimator.removesuffix("+")]
    if estimator.endswith("+"):
        slope = d
    return value, -slope * through
