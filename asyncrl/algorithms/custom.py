"""Functions of the user's own beside the built-in ones: by their place (`pkg.mod:fn`), or by a name that a decorator gives.

    advantage    fn(batch: RewardBatch, **parameters)        → advantages [B] or [B, T]
    loss         fn(inputs: LossInputs, **parameters)        → values [B, T], or a TokenLoss
    correction   fn(inputs: CorrectionInputs, **parameters)  → weights [B, T], or a Corrected

What the function needs is said to the decorator, in the words of `Needs`; it holds for the function by its place, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from asyncrl.config.entries import Needs, UserAdvantage, UserCorrection, UserFunction, UserLoss, is_users
from asyncrl.config.functions import load_function
from asyncrl.errors import UserError

Kind = Literal["advantage", "loss", "correction"]
F = TypeVar("F", bound=Callable[..., Any])

ENTRIES: dict[Kind, type[UserFunction]] = {"advantage": UserAdvantage, "loss": UserLoss, "correction": UserCorrection}
REGISTERED: dict[Kind, dict[str, Callable[..., Any]]] = {"advantage": {}, "loss": {}, "correction": {}}
"""What decorators named, in this process."""
NEEDS = "asyncrl_needs"
"""The attribute of a decorated function that holds its Needs."""


def register(kind: Kind, name: str, taken: Callable[[str], bool], **needs: Any) -> Callable[[F], F]:
    """A decorator that makes a function known as `name`; `taken` says whether a name is built in. Raises UserError for a name
    that cannot be had."""
    if not isinstance(name, str) or not name.isidentifier():
        raise UserError(f"a registered {kind} needs a name of letters, digits and underscores, not {name!r}: give it another")
    if taken(name):
        raise UserError(f"{name!r} is a built-in {kind}: register yours under another name")
    try:
        said = Needs(**{**vars(ENTRIES[kind].requires), **needs})
    except TypeError as error:
        raise UserError(f"register_{kind}({name!r}): {error}: what a {kind} can need is {', '.join(vars(Needs()))}") from None

    def decorate(function: F) -> F:
        known = REGISTERED[kind].get(name)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise UserError(
                f"{kind} {name!r} is registered already, by {known.__module__}.{known.__qualname__}: take another name"
            )
        setattr(function, NEEDS, said)
        REGISTERED[kind][name] = function
        return function

    return decorate


def function_of(kind: Kind, entry: UserFunction) -> Callable[..., Any]:
    """The function that the entry names. Raises UserError when there is none, or it does not take the entry's parameters."""
    function = load_function(entry.name, f"algorithm.{kind}") if is_users(entry.name) else REGISTERED[kind][entry.name]
    try:
        inspect.signature(function).bind(None, **entry.parameters)
    except TypeError as error:
        raise UserError(
            f"{kind} {entry.name} is called with its inputs and the parameters {sorted(entry.parameters)}, but {error}: give the "
            "parameters that it takes"
        ) from None
    return function


def needs_of(kind: Kind, entry: UserFunction) -> Needs:
    """What the function's decorator said, or what any function is taken to need."""
    return getattr(function_of(kind, entry), NEEDS, entry.requires)


def call(kind: Kind, entry: UserFunction, argument: Any) -> Any:
    """What the user's function makes of its inputs."""
    return function_of(kind, entry)(argument, **entry.parameters)
