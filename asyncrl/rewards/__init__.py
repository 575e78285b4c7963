"""Rewards: ready-made reward functions, how a user's own is found, and how it is called so that it can do no harm.

    ready       exact_match, contains, numeric
    function    a name or a Python object ──▶ RewardFunction (which of a sample's fields it takes)
    outcome     what a call returned ──▶ a score, or the reason why there is none; scores ──▶ one reward
    executor    samples ──▶ outcomes, in child processes that are killed when they overrun their limit
    lanes       the two ways of feeding a child: one call after the other, many at once
    child       the program of the child process

Imports protocols, messages, config, errors.
"""

from asyncrl.rewards.function import FunctionSpec, RewardFunction, item_of, resolve
from asyncrl.rewards.outcome import CallOutcome, Item, SampleScore, combine

__all__ = ["CallOutcome", "FunctionSpec", "Item", "RewardFunction", "SampleScore", "combine", "item_of", "resolve"]
