"""What a call of a reward function comes to, and what the calls for one sample come to together. Pure.

A score is a finite number. Whatever else a function returns (None, NaN, an infinity, text), and an exception or a timeout, is
a *failure* with a reason, never a score of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Item = Mapping[str, Any]
"""One sample as reward functions see it: any of `asyncrl.rewards.function.FIELDS`, plain values."""

REASON_CHARACTERS = 300


class CallOutcome(NamedTuple):
    """One call: a score and the numbers logged beside it, or a failure."""

    score: float | None
    logged: dict[str, float]
    failure: str | None


class SampleScore(NamedTuple):
    """One sample: `reward` is the weighted sum of `components` (each function's unweighted score); `metrics` are the numbers that
    the functions logged, by ``function/name``. With a `failure` there is no reward; the components that there are stand."""

    reward: float | None
    components: dict[str, float]
    metrics: dict[str, float]
    failure: str | None


def outcome_of(returned: Any) -> CallOutcome:
    """The outcome of a call that returned: a number, or a mapping with `score` and more to log (numbers are kept)."""
    if type(returned) is float and math.isfinite(returned):  # what most calls return, found at once
        return CallOutcome(returned, {}, None)
    if not isinstance(returned, Mapping):
        number = _number(returned)
        return failed(_not_a_score(returned)) if number is None else CallOutcome(number, {}, None)
    if "score" not in returned:
        return failed(f"returned a mapping without 'score': it has {', '.join(map(repr, list(returned)[:5])) or 'nothing'}")
    number = _number(returned["score"])
    if number is None:
        return failed(_not_a_score(returned["score"]))
    logged = {_clean(str(key)): _number(value) for key, value in returned.items() if key != "score"}
    return CallOutcome(number, {key: value for key, value in logged.items() if value is not None}, None)


def raised(error: BaseException) -> CallOutcome:
    """The outcome of a call that raised. A RewardFailed's text is the reason as it stands."""
    from asyncrl.errors import RewardFailed

    return failed(str(error) if isinstance(error, RewardFailed) else f"raised {type(error).__name__}: {error}")


def timed_out(limit_seconds: float) -> CallOutcome:
    return failed(f"timeout after {limit_seconds:g} s")


def failed(reason: str) -> CallOutcome:
    """A failure; the reason becomes one line of bounded length."""
    line = _clean(" ".join(reason.split()))
    return CallOutcome(None, {}, line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 1] + "…")


def combine(names: Sequence[str], weights: Sequence[float], outcomes: Sequence[CallOutcome]) -> SampleScore:
    """reward = Σ weight · score. The first function that failed fails the sample, named in the reason."""
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    reward, failure = 0.0, None
    for name, weight, (score, logged, reason) in zip(names, weights, outcomes, strict=True):
        if score is not None:
            components[name] = score
            reward += weight * score
        for key, value in logged.items():
            metrics[f"{name}/{key}"] = value
        if reason is not None and failure is None:
            failure = f"{name}: {reason}"
    return SampleScore(None if failure is not None else reward, components, metrics, failure)


def _clean(text: str) -> str:
    """Without lone surrogates, which no message could carry."""
    return text.encode(errors="replace").decode()


def _number(value: Any) -> float | None:
    """A finite float for ints, floats, bools and whatever converts itself (NumPy and torch scalars); else None."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except Exception:  # boundary: __float__ is the code of whoever made the value (an array of two has none)
        return None
    return number if math.isfinite(number) else None


def _not_a_score(value: Any) -> str:
    if value is None:
        return "returned None, not a number"
    if isinstance(value, float):
        return f"returned {value}, not a finite number"
    text = repr(value)
    return f"returned {text if len(text) <= 60 else text[:59] + '…'} ({type(value).__name__}), not a finite number"
