"""From what a caller names to a validated entry: a built-in or registered name, `pkg.mod:fn`, or a mapping with `name` and
parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from asyncrl.algorithms import custom
from asyncrl.algorithms.custom import ENTRIES, REGISTERED, F, Kind
from asyncrl.config.entries import Advantage, Correction, Entry, Loss, UserFunction, entries_of, is_users
from asyncrl.config.problems import parameter_message
from asyncrl.config.walk import nearest
from asyncrl.errors import UserError

BUILT_IN: dict[Kind, dict[str, type[Entry]]] = {
    "advantage": entries_of(Advantage),
    "loss": entries_of(Loss),
    "correction": entries_of(Correction),
}


def resolve(kind: Kind, name: Any, params: Mapping[str, Any]) -> Entry:
    """The entry with these parameters. Raises UserError for a name that none is, and for each parameter that it does not take."""
    if isinstance(name, Entry):
        name = name.model_dump()
    given = dict(name) if isinstance(name, Mapping) else {"name": name}
    twice = sorted(set(given) & set(params))
    if twice:
        raise UserError(f"{kind} is given {twice[0]} twice, in the mapping and by itself: give it once")
    given |= params
    chosen = given.get("name")
    cls: type[Entry] | None = None
    if isinstance(chosen, str):
        cls = BUILT_IN[kind].get(chosen)
        if cls is None and (is_users(chosen) or chosen in REGISTERED[kind]):
            cls = ENTRIES[kind]
    if cls is None:
        raise UserError(_unknown(kind, chosen))
    try:
        entry = cls.model_validate(given)
    except ValidationError as error:
        raise UserError("; ".join(parameter_message(kind, str(chosen), cls, detail) for detail in error.errors())) from None
    if isinstance(entry, UserFunction):
        custom.function_of(kind, entry)
    return entry


def register_advantage(name: str, **needs: Any) -> Callable[[F], F]:
    """Make a function of yours known as an advantage: fn(batch: RewardBatch, **parameters) → [B] or [B, T]. needs: what it
    needs, in the words of `asyncrl.config.entries.Needs`, such as `group=True`."""
    return custom.register("advantage", name, lambda known: known in BUILT_IN["advantage"], **needs)


def register_loss(name: str, **needs: Any) -> Callable[[F], F]:
    """Make a function of yours known as a policy loss: fn(inputs: LossInputs, **parameters) → token values [B, T] or a TokenLoss.
    Its values are multiplied by w unless `weight=False`."""
    return custom.register("loss", name, lambda known: known in BUILT_IN["loss"], **needs)


def register_correction(name: str, **needs: Any) -> Callable[[F], F]:
    """Make a function of yours known as a correction: fn(inputs: CorrectionInputs, **parameters) → weights [B, T] or a
    Corrected."""
    return custom.register("correction", name, lambda known: known in BUILT_IN["correction"], **needs)


def _unknown(kind: Kind, name: object) -> str:
    known = (*BUILT_IN[kind], *REGISTERED[kind])
    if not isinstance(name, str):
        return (
            f"the {kind} is {name!r}, but must be a name, or a mapping with a name and its parameters: one of {', '.join(known)}"
        )
    likest = nearest(name, known)
    return f"there is no {kind} {name!r}: the nearest known one is {likest} (there are {', '.join(known)}, or pkg.mod:fn)"
