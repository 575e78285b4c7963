"""Cross-checks: what two fields, or a field and a fact about model and data, say wrong together. Pure.

Each check is a function `(config, facts) -> Iterator[Problem]` in `CHECKS`; a problem's message has the rule, the values found
and the fix. What would have no effect is in `checks_effect`. `advice` holds what is allowed and worth knowing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from asyncrl.config import checks_algorithm, checks_divergence, checks_effect, checks_staleness, checks_teacher
from asyncrl.config.facts import Facts
from asyncrl.config.schema import Config
from asyncrl.errors import Problem

Check = Callable[[Config, Facts], Iterator[Problem]]

BYTES_PER_TOKEN = 25
"""Of a queued group: id, mask, log-prob and version of each token (13), its text (about 4), and room for what else travels."""

MLFLOW_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file")


def check_config(config: Config, facts: Facts) -> list[Problem]:
    """Every problem that the cross-checks find, in the order of the file's sections."""
    return [problem for check in CHECKS for problem in check(config, facts)]


def advice(config: Config, facts: Facts) -> list[str]:
    """Sentences about what is allowed and may surprise."""
    said = list(facts.unknown)
    training, rollout = config.training, config.rollout
    left = training.steps % training.publish_every
    if left:
        said.append(
            f"the last {left} of {training.steps} steps are trained and not published (training.publish_every is "
            f"{training.publish_every}): the last evaluation does not see them"
        )
    wanted = training.steps * training.groups_per_step
    rows, epochs = facts.train.rows if facts.train else None, config.data.epochs
    if rows is not None and epochs is not None and rows * epochs < wanted:
        said.append(
            f"data.train has {rows} rows, visited {epochs} times (data.epochs): the data ends before {training.steps} steps of "
            f"{training.groups_per_step} groups, and the run ends with it"
        )
    if config.data.eval == config.data.train and not config.data.train.startswith(("builtin/", "<")):
        said.append("data.eval is data.train: evaluations will be on prompts that were trained on")
    if rollout.max_concurrent < config.members_per_group:
        said.append(f"rollout.max_concurrent is {rollout.max_concurrent}, less than one group of {config.members_per_group}")
    said += checks_effect.parameters_without_effect(config)
    said += checks_divergence.surprises(config)
    servers = config.inference.servers * config.inference.tensor_parallel + config.algorithm.serves_teacher
    processes = training.ranks + servers
    if 0 < facts.gpus < processes:
        said.append(
            f"{processes} processes compute (ranks and servers) and there are {facts.gpus} GPUs: all of them run on the CPU"
        )
    elif facts.cores is not None and not facts.gpus and processes > facts.cores:
        said.append(f"{processes} processes compute (ranks and servers) and there are {facts.cores} cores: they share them")
    return said


SGLANG_SPARE_TOKENS = 2
"""Of its context, which an SGLang server keeps for itself: a response that needs them is cut short without a word."""


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with its longest response, and those that the server keeps for itself."""
    spare = SGLANG_SPARE_TOKENS if config.inference.engine == "sglang" else 0
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens + spare


def _context(config: Config, facts: Facts) -> Iterator[Problem]:
    rollout, served, longest = config.rollout, config.inference.context_tokens, longest_sequence(config)
    limit = facts.model.context_tokens if facts.model else None
    spare = longest - rollout.max_prompt_tokens - rollout.max_response_tokens
    kept = f" + {spare} that SGLang keeps" if spare else ""
    if served is not None and longest > served:
        yield Problem(
            "inference.context_tokens",
            f"inference.context_tokens is {served}, but a prompt and its response may take {longest} tokens "
            f"(rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_response_tokens "
            f"{rollout.max_response_tokens}{kept}): raise inference.context_tokens to at least {longest}, or lower those",
        )
    if limit is None:
        return
    if longest > limit:
        longer = "response" if rollout.max_response_tokens >= rollout.max_prompt_tokens else "prompt"
        yield Problem(
            f"rollout.max_{longer}_tokens",
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_response_tokens {rollout.max_response_tokens}"
            f"{kept} is {longest}, but the context of {config.model.path} is {limit} tokens: lower their sum to {limit - spare}",
        )
    elif served is not None and served > limit:
        yield Problem(
            "inference.context_tokens",
            f"inference.context_tokens is {served}, but the context of {config.model.path} is {limit} tokens: lower it to "
            f"{limit}",
        )


def _cache(config: Config, facts: Facts) -> Iterator[Problem]:
    """What the embedded engine's cache of keys and values cannot serve."""
    model = facts.model
    if model is None or config.inference.engine != "embedded":
        return
    if model.other_state is not None:
        yield Problem(
            "model.path",
            f"model.path is {config.model.path}, with layers ({model.other_state}) whose state is no cache of keys and values, "
            "and the embedded engine has no other: use a model with attention alone",
        )
    rollout = config.rollout
    served = config.inference.context_tokens or rollout.max_prompt_tokens + rollout.max_response_tokens
    if model.attention_window is not None and served > model.attention_window:
        yield Problem(
            "rollout.max_response_tokens",
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_response_tokens {rollout.max_response_tokens} "
            f"(or inference.context_tokens) is {served}, but layers of {config.model.path} look back {model.attention_window} "
            f"tokens at most, which the embedded engine does not do: lower them to {model.attention_window}",
        )


def _on_policy(config: Config, facts: Facts) -> Iterator[Problem]:
    if config.rollout.max_staleness != 0 or config.rollout.preset is not None:  # a preset's own keys: checks_staleness
        return
    for field in ("publish_every", "mini_batches", "epochs_per_batch"):
        value = getattr(config.training, field)
        if value != 1:
            yield Problem(
                f"training.{field}",
                f"training.{field} is {value}, but rollout.max_staleness 0 is on-policy training, exactly, which needs 1: set "
                f"training.{field} to 1, or raise rollout.max_staleness",
            )


def _agent(config: Config, facts: Facts) -> Iterator[Problem]:
    agent = config.rollout.agent
    if agent != "single_turn" and ":" not in agent and not agent.startswith("<"):
        yield Problem(
            "rollout.agent",
            f"rollout.agent is {agent!r}, which is no agent: use single_turn, or your own as pkg.mod:fn or file.py:fn",
        )


def _rewards(config: Config, facts: Facts) -> Iterator[Problem]:
    reward, names = config.reward, [item.function for item in config.reward.functions]
    for index, name in enumerate(names):
        if name in names[:index] and not name.startswith("<"):
            yield Problem(
                f"reward.functions.{index}.function",
                f"reward.functions names {name!r} twice: keep one, with the sum of the weights",
            )
    if all(item.weight == 0 for item in reward.functions):
        yield Problem(
            "reward.functions",
            "reward.functions all have weight 0, so every reward is equal and nothing trains: give one a weight",
        )
    if reward.min_scored > config.rollout.group_size:
        yield Problem(
            "reward.min_scored",
            f"reward.min_scored is {reward.min_scored}, but rollout.group_size is {config.rollout.group_size}, so every group "
            f"would fail: lower reward.min_scored to at most {config.rollout.group_size}",
        )


def _queue(config: Config, facts: Facts) -> Iterator[Problem]:
    queue, rollout, groups = config.queue, config.rollout, config.training.groups_per_step
    if queue.capacity < 2 * groups:
        yield Problem(
            "queue.capacity",
            f"queue.capacity is {queue.capacity}, but a step needs {groups} groups (training.groups_per_step): raise "
            f"queue.capacity to at least {2 * groups}",
        )
    group_bytes = rollout.max_prompt_tokens * 10 + rollout.group_size * rollout.max_response_tokens * BYTES_PER_TOKEN
    if queue.capacity_megabytes * 1e6 < group_bytes:
        yield Problem(
            "queue.capacity_megabytes",
            f"queue.capacity_megabytes is {queue.capacity_megabytes:g}, but one group of {rollout.group_size} responses of "
            f"{rollout.max_response_tokens} tokens may take {group_bytes / 1e6:.2g} MB, and could never be sent: raise "
            f"queue.capacity_megabytes to at least {max(1, round(4 * group_bytes / 1e6))}",
        )


def _batches(config: Config, facts: Facts) -> Iterator[Problem]:
    training = config.training
    for field, what in (("ranks", "ranks"), ("mini_batches", "mini-batches")):
        parts = getattr(training, field)
        if training.groups_per_step < parts:
            yield Problem(
                "training.groups_per_step",
                f"training.groups_per_step is {training.groups_per_step}, fewer than the {parts} {what} (training.{field}) that "
                f"share them: raise training.groups_per_step to at least {parts}, or lower training.{field}",
            )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if training.microbatch_tokens < longest:
        yield Problem(
            "training.microbatch_tokens",
            f"training.microbatch_tokens is {training.microbatch_tokens}, but one sequence may take {longest} tokens "
            "(rollout.max_prompt_tokens + rollout.max_response_tokens): raise training.microbatch_tokens to at least that",
        )


def _schedules(config: Config, facts: Facts) -> Iterator[Problem]:
    training = config.training
    if training.publish_every > training.steps:
        yield Problem(
            "training.publish_every",
            f"training.publish_every is {training.publish_every}, but training.steps is {training.steps}, so no new version "
            f"would ever be published: lower training.publish_every to at most {training.steps}",
        )
    if training.warmup_steps > training.steps:
        yield Problem(
            "training.warmup_steps",
            f"training.warmup_steps is {training.warmup_steps}, but training.steps is {training.steps}, so the learning rate "
            f"would never reach its peak: lower training.warmup_steps to at most {training.steps}",
        )


def _evaluation(config: Config, facts: Facts) -> Iterator[Problem]:
    """A section that asks for more than none (every: 0 alone)."""
    said = config.eval.model_fields_set if "eval" in config.model_fields_set else frozenset()
    asks = said and not (said == {"every"} and config.eval.every == 0)
    if asks and config.data.eval is None and "eval" not in config.data.model_fields_set:
        yield Problem(
            "eval",
            "eval says how to evaluate, but data.eval does not say on what: give held-out prompts as data.eval, or leave "
            "eval out (no evaluation)",
        )


def _data_rows(config: Config, facts: Facts) -> Iterator[Problem]:
    for field, found in (("train", facts.train), ("eval", facts.eval)):
        if found is not None and found.rows == 0:
            yield Problem(
                f"data.{field}", f"data.{field} is {getattr(config.data, field)}, which has no row: give it at least one"
            )


def _tracking(config: Config, facts: Facts) -> Iterator[Problem]:
    mlflow = config.tracking.mlflow
    if mlflow is None:
        return
    scheme = urlsplit(mlflow.uri).scheme.partition("+")[0]
    if scheme not in MLFLOW_SCHEMES or (scheme == "sqlite" and not mlflow.uri.startswith("sqlite:///")):
        yield Problem(
            "tracking.mlflow.uri",
            f"tracking.mlflow.uri is {mlflow.uri!r}, which is no store of MLflow's: write sqlite:///file.db, http://host:port, "
            "or tracking.mlflow: null to switch MLflow off",
        )


def _cluster(config: Config, facts: Facts) -> Iterator[Problem]:
    address = config.cluster.ray_address
    if address is None or address == "auto":
        return
    match = re.fullmatch(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})", address)
    if match is None or not 0 < int(match.group(1)) < 65536:
        yield Problem(
            "cluster.ray_address",
            f"cluster.ray_address is {address!r}, which is no address of a Ray cluster: write host:port, auto (the cluster of "
            "this machine), or null to start one",
        )


def _bind_address(config: Config, facts: Facts) -> Iterator[Problem]:
    address = config.cluster.bind_address
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        yield Problem(
            "cluster.bind_address",
            f"cluster.bind_address is {address!r}, which is no IPv4 address: write 127.0.0.1 (this machine alone), an address of "
            "this machine, or 0.0.0.0 where several hosts take part",
        )
        return
    if facts.addresses is not None and address not in ("0.0.0.0", *facts.addresses):
        yield Problem(
            "cluster.bind_address",
            f"cluster.bind_address is {address}, which this machine does not have: write one that it has "
            f"({', '.join(facts.addresses)}), or 0.0.0.0 where several hosts take part",
        )


def _sglang(config: Config, facts: Facts) -> Iterator[Problem]:
    inference, sync = config.inference, config.sync
    if inference.engine != "sglang":
        if sync.mode != "staged":
            yield Problem(
                "sync.mode",
                f"sync.mode is {sync.mode}, which goes through SGLang's own endpoints, and inference.engine is embedded: set "
                "sync.mode to staged, or inference.engine to sglang",
            )
        return
    if inference.attach and len(inference.attach) != inference.servers:
        yield Problem(
            "inference.servers",
            f"inference.servers is {inference.servers}, but inference.attach names {len(inference.attach)}: set "
            f"inference.servers to {len(inference.attach)}",
        )
    urls = [server.url for server in inference.attach]
    for index, server in enumerate(inference.attach):
        if server.url in urls[:index]:
            yield Problem(f"inference.attach.{index}.url", f"inference.attach names {server.url} twice: name each server once")
        if sync.mode == "staged" and server.receiver is None:
            yield Problem(
                f"inference.attach.{index}.receiver",
                f"sync.mode is staged, and no receiver of the server at {server.url} is named: start it with "
                "ASYNCRL_RECEIVER=tcp://HOST:PORT in an environment that has asyncrl (pip install --no-deps asyncrl) and name "
                f"that address as inference.attach.{index}.receiver, or set sync.mode to broadcast or disk",
            )
        if sync.mode != "staged" and sync.verify and server.receiver is None:
            yield Problem(
                "sync.verify",
                f"sync.verify compares what is live in a server with what was published, which needs asyncrl's receiver there, "
                f"and none of the server at {server.url} is named: name it as inference.attach.{index}.receiver, or set "
                "sync.verify to false",
            )
    if sync.mode == "staged" and inference.tensor_parallel > 1:
        yield Problem(
            "inference.tensor_parallel",
            f"inference.tensor_parallel is {inference.tensor_parallel}, and sync.mode staged brings shards to servers of one "
            "device each so far: use more inference.servers, or sync.mode broadcast or disk",
        )


CHECKS: tuple[Check, ...] = (
    _data_rows,
    _context,
    _cache,
    _sglang,
    _on_policy,
    _agent,
    *checks_staleness.CHECKS,
    _rewards,
    _queue,
    *checks_algorithm.CHECKS,
    *checks_teacher.CHECKS,
    *checks_divergence.CHECKS,
    _batches,
    _schedules,
    _evaluation,
    *checks_effect.CHECKS,
    _tracking,
    _cluster,
    _bind_address,
)
