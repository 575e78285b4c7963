"""Combinations of advantage, loss, correction and proximal policy that cannot work. Pure.

What an entry needs it says itself (`asyncrl.config.entries.Needs`); here that is held against the rest of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.entries import UserFunction
from asyncrl.config.facts import Facts
from asyncrl.config.schema import Config
from asyncrl.errors import Problem


def check_group_size(config: Config, facts: Facts) -> Iterator[Problem]:
    """An estimator that compares responses, and nothing to compare."""
    advantage = config.algorithm.advantage
    if config.rollout.group_size == 1 and advantage.needs.group:
        yield Problem(
            "rollout.group_size",
            f"rollout.group_size is 1, but {advantage.name} compares the responses of a group, and every advantage would be "
            "0: raise rollout.group_size to at least 2, or set algorithm.advantage to reinforce_pp and training.filter to keep",
        )


def check_advantage(config: Config, facts: Facts) -> Iterator[Problem]:
    """An estimator without what it is computed from."""
    advantage, needs = config.algorithm.advantage, config.algorithm.advantage.needs
    if needs.components and len(config.reward.functions) < 2:
        yield Problem(
            "algorithm.advantage",
            f"algorithm.advantage is {advantage.name}, which weighs the reward functions' scores one by one, and "
            "reward.functions names one: give it several, each with its weight, or use grpo",
        )
    if needs.components and config.training.filter != "keep":
        yield Problem(
            "training.filter",
            f"training.filter is {config.training.filter}, which goes by the total reward, but {advantage.name} compares the "
            "reward functions' scores one by one, and these may differ where the totals are equal: set training.filter to keep",
        )
    proximal = config.algorithm.proximal
    if proximal not in needs.proximals:
        yield Problem(
            "algorithm.advantage",
            f"algorithm.advantage is {advantage.name}, which needs the proximal policy's probabilities before the first "
            f"update, but algorithm.proximal is {proximal}: set algorithm.proximal to {' or '.join(needs.proximals)}",
        )


def check_loss(config: Config, facts: Facts) -> Iterator[Problem]:
    """A loss that does not go with the advantage or the proximal policy."""
    loss, advantage, proximal = config.algorithm.loss, config.algorithm.advantage, config.algorithm.proximal
    if loss.needs.one_advantage and advantage.needs.per_token and not isinstance(advantage, UserFunction):
        yield Problem(
            "algorithm.loss",
            f"algorithm.loss is {loss.name}, which takes one advantage per response, but algorithm.advantage "
            f"{advantage.name} gives each token its own: use an outcome advantage such as grpo, or another loss",
        )
    if proximal not in loss.needs.proximals:
        yield Problem(
            "algorithm.loss",
            f"algorithm.loss is {loss.name}, which judges the whole mini-batch before its first update, but "
            f"algorithm.proximal is {proximal}: set algorithm.proximal to {' or '.join(loss.needs.proximals)}",
        )


def check_correction(config: Config, facts: Facts) -> Iterator[Problem]:
    """A correction where there is nothing to correct, or that comes too late."""
    correction, loss, proximal = config.algorithm.correction, config.algorithm.loss, config.algorithm.proximal
    if correction.name == "none":
        return
    if not loss.needs.weight:
        yield Problem(
            "algorithm.correction",
            f"algorithm.correction is {correction.name}, but algorithm.loss {loss.name} takes its ratio against the "
            "behaviour policy and no weight: set algorithm.correction to none, or use another loss",
        )
    elif proximal == "behave":
        why = "every weight is 1 and a correction does nothing"
        if loss.needs.anchor == "none":
            why = f"nothing is corrected (the weights of {loss.name} are the current policy's)"
        yield Problem(
            "algorithm.correction",
            f"algorithm.correction is {correction.name}, but with algorithm.proximal behave {why}: set algorithm.correction to "
            "none, or algorithm.proximal to recompute",
        )
    elif loss.needs.anchor == "none" and (correction.needs.drops or correction.needs.mini_batch):
        yield Problem(
            "algorithm.correction",
            f"algorithm.correction is {correction.name}, which judges the mini-batch before its first update, but algorithm.loss "
            f"{loss.name} is weighted by the policy as it is at each: use a correction that weighs alone, such as token_tis",
        )
    elif proximal not in correction.needs.proximals:
        yield Problem(
            "algorithm.correction",
            f"algorithm.correction is {correction.name}, which judges the mini-batch before its first update, but "
            "algorithm.proximal "
            f"{proximal} is not known by then: set algorithm.proximal to {' or '.join(correction.needs.proximals)}",
        )


CHECKS = (check_group_size, check_advantage, check_loss, check_correction)
