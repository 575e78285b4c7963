"""Pipelines from YAML or from Python alone."""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.facts import Facts
from asyncrl.config.load import LoadedConfig, load_config, load_mapping
from asyncrl.config.paths import not_importable
from asyncrl.config.problems import show
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, Problem
from asyncrl.pipeline.run import Run
from asyncrl.pipeline.run_dir import check_state_folder, claim_run_dir


@dataclass(frozen=True)
class Parts:
    """Python objects given in place of names (the same as `asyncrl.cluster.spec.UserObjects`, which a launch turns it into)."""

    rewards: Mapping[int, Callable[..., Any]]
    train: Any = None
    eval: Any = None
    agent: Callable[..., Any] | None = None


NO_PARTS = Parts(rewards={})


class Pipeline:
    """A checked configuration, ready to launch.

    From a file: `Pipeline.from_yaml`. In Python alone, each argument the YAML section or a Python object::

        Pipeline(name="sums", model={"path": …}, reward=my_function, prompts=[{"prompt": …, "ground_truth": …}],
                 rollout={…}, training={"steps": 20})

    reward: a section, a function, a name, or a list of functions and names (weights 1). prompts, eval_prompts: rows (mappings
    with `prompt`, or plain strings), a callable that yields rows, or where they lie, as `data.train` and `data.eval` say it.
    agent: a coroutine function or a name. Raises ConfigError with every problem found.
    """

    def __init__(
        self,
        *,
        reward: Any,
        prompts: Any = None,
        eval_prompts: Any = None,
        agent: Callable[..., Any] | str | None = None,
        overrides: Sequence[str] = (),
        **sections: Any,
    ):
        rewards, reward_section = _reward_section(reward)
        data, rollout = _section("data", sections), _section("rollout", sections)
        prompts, eval_prompts = _rows("prompts", prompts), _rows("eval_prompts", eval_prompts)
        train, eval_rows = _is_object(prompts), _is_object(eval_prompts)
        if prompts is not None:
            data["train"] = _name_of(prompts)
        if eval_prompts is not None:
            data["eval"] = _name_of(eval_prompts)
        if agent is not None:
            rollout["agent"] = agent if isinstance(agent, str) else _name_of(agent)
        self._parts = Parts(
            rewards=rewards,
            train=prompts if train else None,
            eval=eval_prompts if eval_rows else None,
            agent=None if isinstance(agent, str) else agent,
        )
        mapping = {**sections, "data": data, "rollout": rollout, "reward": reward_section}
        self._take(load_mapping(mapping, overrides))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Pipeline:
        """The pipeline that a file describes. overrides: ``training.steps=20`` and the like, values in YAML."""
        pipeline = cls.__new__(cls)
        pipeline._parts = NO_PARTS
        pipeline._take(load_config(path, overrides))
        return pipeline

    def _take(self, loaded: LoadedConfig) -> None:
        """Keep a configuration that passes every check."""
        from asyncrl.pipeline.preflight import preflight

        self.config: Config = loaded.config
        self.facts: Facts = preflight(loaded, self._parts)

    def launch(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        resume: str | os.PathLike[str] = "auto",
        progress: bool | None = None,
    ) -> Run:
        """Start the run and return at once. run_dir: a new or empty folder (default ``runs/<name>-<time>``), or under `resume`
        "auto" that of a run which then goes on. resume: "auto", "never" or the folder of a run. progress: show it in the terminal
        (default: yes)."""
        from asyncrl.pipeline.resuming import finished_summary, folder_to_resume, lock_new, take_over

        earlier = folder_to_resume(os.fspath(resume), run_dir)
        if earlier is not None and (summary := finished_summary(earlier, self.config)) is not None:
            return Run.ended(earlier, summary)
        check_state_folder(run_dir if earlier is None else earlier, self.config)
        resumed = take_over(earlier, self.config) if earlier is not None else None
        folder = claim_run_dir(run_dir, self.config) if resumed is None else resumed.folder
        lock = lock_new(folder) if resumed is None else resumed.lock
        from asyncrl.cluster.launch import make_supervisor, open_door
        from asyncrl.cluster.spec import RunSpec, UserObjects

        spec = RunSpec(
            config=self.config.to_mapping(),
            run_dir=str(folder),
            run_id=uuid.uuid4().hex[:12],
            import_paths=tuple(dict.fromkeys([os.getcwd(), *(path for path in sys.path if path)])),
            objects=UserObjects(self._parts.rewards, self._parts.train, self._parts.eval, self._parts.agent),
        )
        open_door(spec)
        return Run(
            folder,
            lambda: make_supervisor(
                spec,
                show_progress=progress is not False,
                resume=resumed.resume if resumed is not None else None,
                mlflow_run_id=resumed.mlflow_run_id if resumed is not None else None,
            ),
            lock=lock,
            resumed=resumed.words() if resumed is not None else (),
        )


def launch(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] = "auto",
) -> dict[str, Any]:
    """Launch a pipeline file and wait for its end: the summary."""
    return Pipeline.from_yaml(path, overrides).launch(run_dir, resume=resume).wait()


def _reward_section(reward: Any) -> tuple[dict[int, Callable[..., Any]], Any]:
    """(objects by position, the reward section)."""
    section = dict(reward) if isinstance(reward, Mapping) else {"functions": reward}
    entries = section.get("functions")
    if callable(entries) or isinstance(entries, str):
        entries = [entries]
    if not isinstance(entries, Iterable):
        return {}, section
    objects: dict[int, Callable[..., Any]] = {}
    functions = []
    for position, entry in enumerate(entries):
        fields = dict(entry) if isinstance(entry, Mapping) else {"function": entry}
        if callable(fields.get("function")):
            objects[position] = fields["function"]
            fields["function"] = _name_of(fields["function"])
        functions.append(fields)
    return objects, {**section, "functions": functions}


def _section(name: str, sections: dict[str, Any]) -> dict[str, Any]:
    """A copy of a section that other arguments add to. Raises ConfigError where it is none."""
    given = sections.pop(name, {})
    if not isinstance(given, Mapping):
        raise ConfigError([Problem(name, f"{name} is {show(given)}, but must be a mapping: write {name}={{…}}")])
    return dict(given)


def _rows(name: str, given: Any) -> Any:
    """Rows as a list (of any collection: a tuple, a Hugging Face dataset); a function and a name as they are."""
    if given is None or callable(given) or isinstance(given, str | list):
        return given
    if isinstance(given, Mapping) or hasattr(given, "iterrows") or not (hasattr(given, "__len__") and hasattr(given, "__iter__")):
        fix = "give a list of rows (for a data frame: frame.to_dict('records')), a function that yields rows, or a file's path"
        raise ConfigError([Problem(name, f"{name} is {show(given)}, which is no list of rows: {fix}")])
    return list(given)


def _is_object(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


def _name_of(value: Any) -> str:
    """The name by which another process finds this object, or `<not importable>`."""
    if isinstance(value, str):
        return value
    script = Path(sys.argv[0]).absolute()
    nameless = not_importable(script if script.is_file() else "an interactive session")
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name or "." in name:
        return nameless
    found = getattr(importlib.import_module(module), name, None)
    return f"{module}:{name}" if found is value else nameless
