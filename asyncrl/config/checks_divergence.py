"""The divergence from a reference model (`algorithm.kl`) held against the rest of the file: what cannot work, or would not act.
Pure."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.facts import Facts, ModelFacts
from asyncrl.config.schema import Config
from asyncrl.errors import Problem

BUILTIN = "builtin/"


def check_coefficient(config: Config, facts: Facts) -> Iterator[Problem]:
    """A coefficient that does nothing, or that its own rule would carry below 0."""
    kl = config.algorithm.kl
    if kl is None:
        return
    if kl.coefficient == 0:
        yield Problem(
            "algorithm.kl.coefficient",
            "algorithm.kl.coefficient is 0, so a reference model would be loaded and asked for nothing: set it above 0, or "
            "algorithm.kl to null",
        )
    if kl.adaptive is None:
        return
    if kl.name == "k1" and kl.where == "loss":
        yield Problem(
            "algorithm.kl.adaptive",
            "algorithm.kl.adaptive moves the coefficient to hold a divergence, but the expected gradient of k1 in the loss is 0 "
            "whatever the coefficient: use k1+, whose gradient is the divergence's, or k3",
        )
    responses = config.training.groups_per_step * config.rollout.group_size
    if kl.adaptive.horizon < responses:
        yield Problem(
            "algorithm.kl.adaptive.horizon",
            f"algorithm.kl.adaptive.horizon is {kl.adaptive.horizon:g}, but a step has {responses} responses "
            "(training.groups_per_step × rollout.group_size), so that one step could move the coefficient by more than a fifth: "
            f"raise it to at least {responses}",
        )


def check_reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """A divergence in the reward that would not reach the advantages, or reach them in part."""
    kl, advantage, loss = config.algorithm.kl, config.algorithm.advantage, config.algorithm.loss
    if kl is None or kl.where == "loss":
        return
    if kl.name.endswith("+"):
        yield Problem(
            "algorithm.kl",
            f"algorithm.kl is {kl.name}, whose `+` is about a gradient, and algorithm.kl.where reward takes its value alone: use "
            f"{kl.name.removesuffix('+')}, or set algorithm.kl.where to loss",
        )
    if advantage.needs.teacher:
        yield Problem(
            "algorithm.kl.where",
            f"algorithm.kl.where is reward, but {advantage.name} takes each token's advantage from the teacher, and the "
            "divergence would not reach it: set algorithm.kl.where to loss",
        )
    if advantage.needs.components:
        yield Problem(
            "algorithm.kl.where",
            f"algorithm.kl.where is reward, but {advantage.name} compares the reward functions' scores one by one, and not the "
            "total that the divergence is subtracted from: set algorithm.kl.where to loss",
        )
    elif config.training.filter != "keep":
        yield Problem(
            "training.filter",
            f"training.filter is {config.training.filter}, which goes by rewards before the divergence is subtracted "
            "(algorithm.kl.where reward), and would remove groups whose rewards differ by it alone: set training.filter to keep, "
            "or algorithm.kl.where to loss",
        )
    if loss.needs.one_advantage and advantage.needs.token_rewards and not advantage.needs.per_token:
        yield Problem(
            "algorithm.kl.where",
            f"algorithm.kl.where is reward, so that {advantage.name} gives each token its own advantage, but algorithm.loss "
            f"{loss.name} takes one per response: set algorithm.kl.where to loss, or use an outcome advantage such as rloo",
        )


def check_reference(config: Config, facts: Facts) -> Iterator[Problem]:
    """A reference that cannot be compared with, or never comes."""
    algorithm, training = config.algorithm, config.training
    path, every = algorithm.reference.path, algorithm.reference.refresh_every
    if algorithm.kl is None:
        return
    last = (training.steps - 1) // training.publish_every
    if every > last:
        fix = f"lower it to at most {last}, or set it to 0" if last else "set it to 0"
        yield Problem(
            "algorithm.reference.refresh_every",
            f"algorithm.reference.refresh_every is {every}, but the last step begins at version {last} (training.steps, "
            f"training.publish_every), so that the reference never changes: {fix}",
        )
    if path is not None and path.startswith(BUILTIN):
        yield Problem(
            "algorithm.reference.path",
            f"algorithm.reference.path is {path}, but a built-in model is made for the policy alone: leave it out (the policy's "
            "own weights at the start), or give a model folder",
        )
    yield from _comparable(config, facts)


def _comparable(config: Config, facts: Facts) -> Iterator[Problem]:
    """As far as both models' sizes are known."""
    policy, reference, key = facts.model, facts.reference, "algorithm.reference.path"
    if policy is None or reference is None:
        return
    path = config.algorithm.reference.path
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if reference.context_tokens is not None and reference.context_tokens < longest:
        yield Problem(
            key,
            f"{key} is {path}, whose context is {reference.context_tokens} tokens, but a sequence may have {longest} "
            "(rollout.max_prompt_tokens + rollout.max_response_tokens): lower these, or give another model",
        )
    if policy.vocabulary is not None and reference.vocabulary not in (None, policy.vocabulary):
        yield Problem(
            key,
            f"{key} is {path}, with a vocabulary of {reference.vocabulary}, but the policy's has {policy.vocabulary}, and their "
            "distributions cannot be compared: give a model with the policy's vocabulary",
        )
    elif config.algorithm.reference.refresh_every and _sizes(policy) != _sizes(reference):
        yield Problem(
            key,
            f"{key} is {path}, whose sizes are not those of model.path, and algorithm.reference.refresh_every copies the "
            "policy's weights into it: give a model of the policy's own sizes, or set algorithm.reference.refresh_every to 0",
        )


def _sizes(model: ModelFacts) -> tuple[object, ...]:
    return model.architecture, model.layers, model.hidden, model.kv_heads, model.head_dim, model.vocabulary


def surprises(config: Config) -> Iterator[str]:
    """What is allowed and may surprise."""
    kl, advantage = config.algorithm.kl, config.algorithm.advantage
    if kl is None:
        return
    if kl.name == "k1" and kl.where == "loss":
        yield (
            "algorithm.kl k1 in the loss has an expected gradient of 0, and holds the policy nowhere: k1+ has its value and the "
            "divergence's gradient"
        )
    if kl.where == "reward" and getattr(advantage, "normalize_std", False):
        yield (
            f"algorithm.advantage {advantage.name} divides by the group's standard deviation: where rewards are equal, what is "
            "left is the divergence alone, scaled up to advantages of size 1 (normalize_std: false leaves it as it is)"
        )


CHECKS = (check_coefficient, check_reward, check_reference)
