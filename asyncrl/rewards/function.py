"""Reward functions by name or as Python objects, and which fields of a sample each of them takes.

A function is called with keyword arguments only, those of `FIELDS` that its signature accepts (all of them for ``**kwargs``).
It is sync or async, and returns a number or a mapping with `score`; see `asyncrl.rewards.outcome`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.functions import load_function, names_function
from asyncrl.errors import UserError
from asyncrl.rewards.outcome import Item
from asyncrl.rewards.ready import READY_MADE

if TYPE_CHECKING:
    from asyncrl.messages import Trajectory

FIELDS = ("prompt", "response", "ground_truth", "extra_info", "messages", "tool_calls", "finish_reason")
_fields_of = attrgetter(*FIELDS)
KEY = "reward.functions[].function"


@dataclass(frozen=True)
class RewardFunction:
    """A function ready to be called: `accepts` are the fields that it takes."""

    name: str
    function: Callable[..., Any]
    accepts: tuple[str, ...]
    is_async: bool

    def __call__(self, item: Item) -> Any:
        """Whatever the function returns (a coroutine when it is async). A field that the sample lacks is None."""
        return self.function(**{field: item.get(field) for field in self.accepts})


def item_of(trajectory: Trajectory) -> Item:
    """A trajectory as reward functions see it: all of `FIELDS`."""
    return dict(zip(FIELDS, _fields_of(trajectory), strict=True))


def resolve(function: str | Callable[..., Any]) -> RewardFunction:
    """The function that a ready-made name, ``pkg.mod:fn``, ``path/file.py:fn`` or a Python object stands for.

    A path counts from the working directory; a module is looked for there, too. Importing runs the module. Raises UserError that
    names what cannot be found, imported or called.
    """
    if not isinstance(function, str):
        return _checked(getattr(function, "__name__", type(function).__name__), function)
    if function in READY_MADE:
        return _checked(function, READY_MADE[function])
    if not names_function(function):
        raise UserError(f"{KEY} is {function!r}, which is no ready-made reward{_nearest(function, READY_MADE)}: "
                        f"write one of {', '.join(READY_MADE)}, or your own as pkg.mod:fn or path/file.py:fn")  # fmt: skip
    _put_working_directory_on_path()
    return _checked(function, load_function(_placed(function), KEY))


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function on its way to the process that calls it, with plain values only.

    source: a name for `resolve`; or None, and then `payload` is the function itself, serialised by cloudpickle and opened in the
    child process alone. `name`, shortened, is what metrics and reasons call it.
    """

    name: str
    source: str | None
    payload: bytes | None = None

    @classmethod
    def of(cls, name: str, function: str | Callable[..., Any]) -> FunctionSpec:
        """From a name (a path is made absolute, so that any working directory will do) or a Python object, whose own name stands
        in for a `name` such as ``<not importable>``."""
        if isinstance(function, str):
            return cls(name, _placed(function) if names_function(function) else function)
        import cloudpickle

        own_name = getattr(function, "__name__", type(function).__name__)
        return cls(own_name if name.startswith("<") else name, None, cloudpickle.dumps(function))

    def load(self) -> RewardFunction:
        """Raises UserError like `resolve`."""
        if self.source is not None:
            return resolve(self.source)
        import pickle

        assert self.payload is not None, self.name
        return _checked(self.name, pickle.loads(self.payload))

    @property
    def is_ready_made(self) -> bool:
        return self.source in READY_MADE


def _placed(function: str) -> str:
    """``path/file.py:fn`` with its path absolute; any other name as it is."""
    place, _, name = function.rpartition(":")
    if not place.endswith(".py"):
        return function
    return f"{Path(place).expanduser().absolute()}:{name}"


def _put_working_directory_on_path() -> None:
    """An installed command, unlike ``python -m``, does not see modules in the working directory."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _checked(name: str, function: Any) -> RewardFunction:
    if not callable(function):
        raise UserError(f"reward function {name} is a {type(function).__name__}: give a function")
    accepts = _accepted_fields(name, function)
    return RewardFunction(name, function, accepts, _is_async(function))


def _accepted_fields(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward function {name} has no signature to read: wrap it in a Python function that takes {_listed()}"
        ) from error
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return FIELDS
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        known = parameter.name in FIELDS and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        if not known and parameter.default is inspect.Parameter.empty:
            kind = "positional-only parameter" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else "parameter"
            raise UserError(f"reward function {name} needs the {kind} {parameter.name!r}{_nearest(parameter.name, FIELDS)}: "
                            f"it is called by keyword, with {_listed()}")  # fmt: skip
    return tuple(field for field in FIELDS if field in parameters)


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _listed() -> str:
    return f"any of {', '.join(FIELDS)}"


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
