"""Advantages in plain numpy, float64, one response and one token at a time: written from the formulas, not from the code.

R [B] (NaN = missing), groups [B], m bool [B, T]. Each returns [B, T]: 0 outside the mask and where the reward is missing.
"""

from __future__ import annotations

import numpy as np


def scored(R):
    return np.isfinite(R)


def members(R, groups, b):
    return [i for i in range(len(R)) if groups[i] == groups[b] and scored(R)[i]]


def differs(R, group):
    return len(group) > 1 and max(R[i] for i in group) > min(R[i] for i in group)


def spread(values, R, m):
    """A value per response on each of its trainable tokens."""
    return np.where(m & scored(R)[:, None], np.where(scored(R), values, 0.0)[:, None], 0.0)


def whiten(values, m):
    chosen = values[m]
    if len(chosen) < 2:
        return np.zeros(m.shape)
    return np.where(m, (values - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0.0)


def grpo_values(R, groups, normalize_std=True):
    out = np.zeros(len(R))
    for b in range(len(R)):
        group = members(R, groups, b)
        if not scored(R)[b] or not differs(R, group):
            continue
        rewards = np.array([R[i] for i in group])
        out[b] = R[b] - rewards.mean()
        if normalize_std:
            out[b] /= rewards.std(ddof=1) + 1e-6
    return out


def grpo(R, groups, m, normalize_std=True, **_):
    return spread(grpo_values(R, groups, normalize_std), R, m)


def rloo(R, groups, m, **_):
    out = np.zeros(len(R))
    for b in range(len(R)):
        group = members(R, groups, b)
        if scored(R)[b] and differs(R, group):
            out[b] = R[b] - np.mean([R[i] for i in group if i != b])
    return spread(out, R, m)


def reinforce_pp(R, groups, m, gamma=1.0, **_):
    kept = m & scored(R)[:, None]
    out = np.zeros(m.shape)
    for b in range(len(R)):
        running = None
        for t in reversed(range(m.shape[1])):
            if kept[b, t]:
                running = R[b] if running is None else gamma * running
                out[b, t] = running
    return whiten(out, kept)


def reinforce_pp_baseline(R, groups, m, **_):
    return whiten(grpo(R, groups, m, normalize_std=False), m & scored(R)[:, None])


def remax(R, groups, m, greedy_rewards, **_):
    R = np.where(np.isfinite(greedy_rewards), R, np.nan)
    return spread(R - greedy_rewards, R, m)


def distillation(R, groups, m, teacher_log_probs, behaviour_log_probs, coefficient=1.0, reward_coefficient=0.0, **_):
    m = m & scored(R)[:, None]
    ratio = np.clip(np.where(m, teacher_log_probs, 0.0) - np.where(m, behaviour_log_probs, 0.0), -20, 20)
    return np.where(m, coefficient * ratio + reward_coefficient * np.where(scored(R), R, 0.0)[:, None], 0.0)


def opo(R, groups, m, **_):
    out = np.zeros(len(R))
    for b in range(len(R)):
        group = members(R, groups, b)
        lengths = sum(m[i].sum() for i in group)
        if scored(R)[b] and differs(R, group) and lengths:
            out[b] = R[b] - sum(m[i].sum() * R[i] for i in group) / lengths
    return spread(out, R, m)


def gpg(R, groups, m, f_norm=1.0, **_):
    useful = [b for b in range(len(R)) if scored(R)[b] and differs(R, members(R, groups, b))]
    out = np.zeros(len(R))
    for b in useful:
        out[b] = (R[b] - np.mean([R[i] for i in members(R, groups, b)])) * scored(R).sum() / len(useful) / f_norm
    return spread(out, R, m)


def grpo_passk(R, groups, m, normalize_std=True, **_):
    out = np.zeros(len(R))
    for b in range(len(R)):
        group = members(R, groups, b)
        if not scored(R)[b] or len(group) < 2:
            continue
        first, second = sorted((R[i] for i in group), reverse=True)[:2]
        if R[b] == first and first > second:
            out[b] = first - second
            if normalize_std:
                out[b] /= np.std([R[i] for i in group], ddof=1) + 1e-6
    return spread(out, R, m)


def gdpo(R, groups, m, reward_components, component_weights, **_):
    R = np.where(np.isfinite(reward_components).all(1), R, np.nan)
    x = np.zeros(len(R))
    for k, weight in enumerate(component_weights):
        x += weight * grpo_values(np.where(scored(R), reward_components[:, k], np.nan), groups)
    chosen = x[scored(R)]
    if len(chosen) < 2 or chosen.max() == chosen.min():
        return np.zeros(m.shape)
    return spread((x - chosen.mean()) / (chosen.std(ddof=1) + 1e-6), R, m)


def gae(rewards, values, m, gamma, lam):
    """(whitened advantages, returns) from rewards and values of every token."""
    raw, returns = np.zeros(m.shape), np.zeros(m.shape)
    for b in range(len(m)):
        positions = np.flatnonzero(m[b])
        for k, t in enumerate(positions):  # the sum form, not the recursion: A_t = Σ_l (γλ)^l δ_{t+l}
            total = 0.0
            for step, u in enumerate(positions[k:]):
                following = positions[k + step + 1 :]
                after = values[b, following[0]] if len(following) else 0.0
                total += (gamma * lam) ** step * (rewards[b, u] + gamma * after - values[b, u])
            raw[b, t] = total
            returns[b, t] = total + values[b, t]
    return whiten(raw, m), returns


def path_variance(m, log_probs, sum_pi_squared, b, t):
    return sum(1 - 2 * np.exp(log_probs[b, j]) + sum_pi_squared[b, j] for j in range(t + 1) if m[b, j])


def optimal_token_baseline(R, groups, m, log_probs, sum_pi_squared, **_):
    out = np.zeros(m.shape)
    for b in range(len(R)):
        group = members(R, groups, b)
        if not scored(R)[b] or len(group) < 2:
            continue
        for t in np.flatnonzero(m[b]):
            left = [i for i in group if m[i, t]]
            W = {i: path_variance(m, log_probs, sum_pi_squared, i, t) for i in left}
            baseline = sum(R[i] * W[i] for i in left) / (sum(W.values()) + 1e-8) if len(left) > 1 else 0.0
            out[b, t] = R[b] - baseline
    return out


def turns(row):
    """Lists of positions: runs of trainable tokens."""
    found, before = [], False
    for t, here in enumerate(row):
        if here and not before:
            found.append([])
        if here:
            found[-1].append(t)
        before = here
    return found


def tir_optimal_token_baseline(R, groups, m, log_probs, sum_pi_squared, **_):
    out = np.zeros(m.shape)
    for b in range(len(R)):
        group = members(R, groups, b)
        if not scored(R)[b] or len(group) < 2:
            continue
        for k, turn in enumerate(turns(m[b])):
            left = [i for i in group if len(turns(m[i])) > k]
            W = {i: path_variance(m, log_probs, sum_pi_squared, i, turns(m[i])[k][-1]) for i in left}
            baseline = sum(R[i] * W[i] for i in left) / (sum(W.values()) + 1e-8) if len(left) > 1 else 0.0
            for t in turn:
                out[b, t] = R[b] - baseline
    return out
