"""Everything that is refused before anything starts: facts gathered from disk and from user code, then the cross-checks.

No torch, no ray: `asyncrl check` runs this in a second. User modules are imported here (a reward that cannot be imported must not
fail in a worker minutes later), and called nowhere.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from asyncrl.agents.user import check_agent
from asyncrl.config.checks import check_config
from asyncrl.config.entries import UserFunction
from asyncrl.config.facts import DataFacts, Facts, ModelFacts
from asyncrl.config.functions import load_function, names_function
from asyncrl.config.load import LoadedConfig
from asyncrl.config.paths import NOT_IMPORTABLE
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, Problem, UserError
from asyncrl.pipeline.model_folder import BUILTIN_PREFIX, HUB_NAME, HubUnreachable, has_chat_template, read_model
from asyncrl.protocols import Prompt

if TYPE_CHECKING:
    from asyncrl.pipeline.pipeline import Parts

WHOLE_FILE_BYTES = 200_000_000
"""A data file up to this size is read row by row beforehand; of a larger one only the existence is checked."""


def preflight(loaded: LoadedConfig, parts: Parts | None = None, *, starts: bool = True) -> Facts:
    """Facts of a pipeline that may start. `parts`: Python objects that stand in place of names. starts: it is about to; else what
    cannot be learned here (a hub model, where the hub cannot be reached) is noted, not refused.

    Raises ConfigError with every problem: what the facts show (missing file, unreadable model, unknown reward) and what the
    cross-checks find.
    """
    problems: list[Problem] = []
    facts = gather(loaded.config, parts, problems, starts=starts)
    problems += check_config(loaded.config, facts)
    if problems:
        raise ConfigError([loaded.places.locate(problem) for problem in problems])
    return facts


def gather(config: Config, parts: Parts | None, problems: list[Problem], *, starts: bool) -> Facts:
    """What can be learned; what cannot, though it must, is added to `problems`."""
    unknown: list[str] = []
    problems += _objects(config, parts)
    async_rewards = _rewards(config, parts, problems)
    problems += _agent(config, parts)
    problems += _algorithm(config)
    problems += _store(config)
    problems += _state_dir(config)
    gpus = count_gpus()
    problems += _attention(config, gpus)
    return Facts(
        model=_model(config, problems, unknown if not starts else None),
        train=_data("data.train", config, parts.train if parts else None, problems),
        eval=_data("data.eval", config, parts.eval if parts else None, problems),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        gpus=gpus,
        addresses=_addresses(config.cluster.bind_address),
        async_rewards=async_rewards,
        teacher=_teacher(config, problems),
        reference=_reference(config, problems),
        unknown=tuple(unknown),
    )


def count_gpus() -> int:
    """NVIDIA devices that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name.removeprefix("nvidia").isdigit()])


def _addresses(wanted: str) -> tuple[str, ...]:
    from asyncrl.transport.hosts import addresses_of_host, is_here

    found = tuple(addresses_of_host().values())
    return (*found, wanted) if wanted not in found and is_here(wanted) else found


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _model(config: Config, problems: list[Problem], unknown: list[str] | None) -> ModelFacts | None:
    """unknown: where what nobody can say here is told; None: it is refused."""
    tokenizer = config.model.tokenizer
    if tokenizer is not None and not (Path(tokenizer).is_dir() or HUB_NAME.fullmatch(tokenizer)):
        message = (
            f"model.tokenizer is {tokenizer}, and there is no such folder: give the folder that holds tokenizer.json, or a hub "
            "name such as owner/model"
        )
        problems.append(Problem("model.tokenizer", message))
    try:
        return read_model(config.model.path, needs_tokenizer=tokenizer is None)
    except HubUnreachable as error:
        if unknown is None:
            problems.append(Problem("model.path", str(error)))
        else:
            unknown.append(f"{error}; a launch would refuse it here, and what depends on the model's sizes was not checked")
        return None
    except UserError as error:
        problems.append(Problem("model.path", str(error)))
        return None


def _teacher(config: Config, problems: list[Problem]) -> ModelFacts | None:
    """None where there is none, or where its hub cannot be asked: then the start says what is wrong with it."""
    path = config.algorithm.teacher.path
    if path is None or not config.algorithm.advantage.needs.teacher:
        return None
    try:
        return read_model(path)
    except HubUnreachable:
        return None
    except UserError as error:
        problems.append(Problem("algorithm.teacher.path", str(error).replace("model.path", "algorithm.teacher.path")))
        return None


def _reference(config: Config, problems: list[Problem]) -> ModelFacts | None:
    """Of a folder; what a hub name means is seen when it is loaded."""
    key, path = "algorithm.reference.path", config.algorithm.reference.path
    if config.algorithm.kl is None or path is None or path.startswith(BUILTIN_PREFIX) or HUB_NAME.fullmatch(path):
        return None
    try:
        return read_model(path, needs_tokenizer=False)
    except UserError as error:
        problems.append(Problem(key, str(error).replace("model.path", key)))
        return None


def _data(key: Literal["data.train", "data.eval"], config: Config, given: Any, problems: list[Problem]) -> DataFacts | None:
    """Rows of a table, each checked as far as it can be without a tokenizer; the function that yields a stream is imported, not
    called."""
    said = config.data.train if key == "data.train" else config.data.eval
    if said is None or (said.startswith(NOT_IMPORTABLE) and given is None):
        return None
    try:
        if callable(given):
            return DataFacts()
        if given is None and names_function(said):
            load_function(said, key)
            return DataFacts()
        if given is None and Path(said).is_file() and Path(said).stat().st_size > WHOLE_FILE_BYTES:
            return DataFacts()
        from asyncrl.data import TableSource, check_longest_response, open_eval_prompts, open_prompts

        data = given if given is not None else said
        if key == "data.eval":
            prompts: Sequence[Prompt] = open_eval_prompts(data, samples=sys.maxsize, key=key)
        else:
            source = open_prompts(data, seed=0, shuffle=False, key=key)
            prompts = source.prompts if isinstance(source, TableSource) else ()
        check_longest_response(prompts, max_response_tokens=config.rollout.max_response_tokens, key=key)
        problems += _messages(key, prompts, config)
        return DataFacts(len(prompts) or None)
    except UserError as error:
        problems.append(Problem(key, str(error)))
        return None


def _messages(key: str, prompts: Sequence[Prompt], config: Config) -> Iterator[Problem]:
    """Chat messages become tokens through the tokenizer's chat template."""
    chat = next((prompt for prompt in prompts if not isinstance(prompt.prompt, str)), None)
    tokenizer = config.model.tokenizer or config.model.path
    if chat is not None and has_chat_template(tokenizer) is False:
        yield Problem(
            key,
            f"{key}: the prompt of row {chat.row} is a list of messages, and the tokenizer of {tokenizer} has no chat template: "
            "give text, a model that was tuned to chat, or a tokenizer with a chat_template.jinja as model.tokenizer",
        )


def _rewards(config: Config, parts: Parts | None, problems: list[Problem]) -> bool | None:
    """Whether some function is async; None where one cannot be looked at."""
    from asyncrl.rewards import resolve

    given = parts.rewards if parts else {}
    found: list[bool | None] = []
    for position, item in enumerate(config.reward.functions):
        key = f"reward.functions.{position}.function"
        if position not in given and item.function.startswith(NOT_IMPORTABLE):
            found.append(None)
            continue
        try:
            found.append(resolve(given.get(position, item.function)).is_async)
        except UserError as error:
            found.append(None)
            problems.append(Problem(key, str(error).replace("reward.functions[].function", key)))
    return True if True in found else None if None in found else False


def _algorithm(config: Config) -> Iterator[Problem]:
    """Functions of the user's own in the place of a built-in advantage, loss or correction."""
    for part in ("advantage", "loss", "correction"):
        entry, key = getattr(config.algorithm, part), f"algorithm.{part}"
        if not isinstance(entry, UserFunction):
            continue
        try:
            function = load_function(entry.name, key)
            inspect.signature(function).bind(None, **entry.parameters)
        except UserError as error:
            yield Problem(key, str(error))
        except TypeError as error:
            yield Problem(
                key,
                f"{key} is {entry.name}, which is called with its inputs and "
                f"{', '.join(entry.parameters) or 'no parameter'}, but {error}: give the parameters that it takes",
            )


def _agent(config: Config, parts: Parts | None) -> Iterator[Problem]:
    agent = config.rollout.agent
    given = parts.agent if parts else None
    try:
        if given is not None:
            check_agent(given)
        elif names_function(agent):
            check_agent(load_function(agent, "rollout.agent"))
    except UserError as error:
        yield Problem("rollout.agent", str(error))


def _objects(config: Config, parts: Parts | None) -> Iterator[Problem]:
    """Places where a Python object stood that cannot be imported by name, and none is given now."""
    said: dict[str, tuple[str | None, bool]] = {
        "data.train": (config.data.train, parts is not None and parts.train is not None),
        "data.eval": (config.data.eval, parts is not None and parts.eval is not None),
        "rollout.agent": (config.rollout.agent, parts is not None and parts.agent is not None),
    }
    for position, item in enumerate(config.reward.functions):
        said[f"reward.functions.{position}.function"] = (item.function, parts is not None and position in parts.rewards)
    for key, (text, given) in said.items():
        if text is not None and text.startswith(NOT_IMPORTABLE) and not given:
            script = text.removeprefix(f"{NOT_IMPORTABLE} made by ").strip()
            where = "the Python script that built this pipeline" if script in ("", NOT_IMPORTABLE) else script
            yield Problem(
                key, f"{key} was a Python object that cannot be imported by name: run {where} again, or name a function here"
            )


def _store(config: Config) -> Iterator[Problem]:
    mlflow = config.tracking.mlflow
    if mlflow is None or urlsplit(mlflow.uri).scheme != "sqlite":
        return
    folder = Path(mlflow.uri.removeprefix("sqlite:///")).parent
    if mlflow.uri.startswith("sqlite:////") and not folder.is_dir():
        yield Problem(
            "tracking.mlflow.uri", f"tracking.mlflow.uri is {mlflow.uri}, and there is no folder {folder}: make it first"
        )


def _state_dir(config: Config) -> Iterator[Problem]:
    """A folder that could not be made, or that cannot keep a ledger."""
    from asyncrl.ledger.file_systems import refuse_network_file_system

    if config.cluster.state_dir is None:
        return
    folder = Path(config.cluster.state_dir)
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "may not be written to" if nearest.is_dir() else "is a file"
        yield Problem(
            "cluster.state_dir",
            f"cluster.state_dir is {folder}, which cannot be made ({nearest} {why}): name a folder on a local disk that you may "
            "write to",
        )
        return
    try:
        refuse_network_file_system(folder, "the ledger and the queue's journal")
    except UserError as error:
        yield Problem("cluster.state_dir", f"cluster.state_dir is {folder}: {error}")


def _attention(config: Config, gpus: int) -> Iterator[Problem]:
    if config.model.attention != "flash_attention_2":
        return
    lacking = [] if gpus else ["a GPU (there is none)"]
    if gpus and importlib.util.find_spec("flash_attn") is None:
        lacking.append("the package flash-attn (install asyncrl[gpu])")
    if config.model.dtype != "bfloat16":
        lacking.append("model.dtype bfloat16")
    if lacking:
        message = (
            f"model.attention is flash_attention_2, which needs {' and '.join(lacking)}: set model.attention to auto or sdpa"
        )
        yield Problem("model.attention", message)
