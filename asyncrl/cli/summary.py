"""summary.json for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.cli.words import at, number, seconds

ENDS = ("filtered", "failed", "expired", "queued", "in_flight")


def summary_text(summary: Mapping[str, Any]) -> str:
    """The figures of an ended run, a line each; the first says how it ended."""
    steps, version = summary["steps"], summary["policy_version"]
    lines = [f"{summary['status']}: {steps} steps in {seconds(summary['wall_s'])}, policy version {version}"]
    lines += [f"  {name.ljust(12)}{value}" for name, value in _figures(summary) if value is not None]
    return "\n".join(lines)


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    return [
        ("reward", _change(summary["reward"], "mean of the first and of the last steps")),
        ("evaluation", _change(summary["eval"], "the first and the last one, on data.eval")),
        ("staleness", _staleness(summary["staleness"])),
        ("responses", _responses(summary)),
        ("groups", _groups(summary["samples"])),
        ("new weights", _sync(summary["sync"])),
        ("checkpoint", checkpoint_text(summary["checkpoints"]) if summary.get("checkpoints") else None),
    ]


def checkpoint_text(told: Mapping[str, Any]) -> str:
    """The newest one, and how many failed, as the trainer tells it."""
    newest, failed = told.get("checkpoint"), told.get("checkpoints_failed")
    text = "none" if newest is None else f"of step {newest}"
    if not failed:
        return text
    why = told.get("checkpoint_error")
    return f"{text}; {failed} failed, {f'the last of {why}' if why else 'see logs/trainer-0.log'}"


def _change(figure: Mapping[str, Any], what: str) -> str | None:
    if figure.get("last") is None:
        return None
    return f"{number(figure.get('first'))} → {number(figure['last'])} ({what})"


def _staleness(figure: Mapping[str, Any]) -> str | None:
    if figure.get("max") is None:
        return None
    text = f"mean {number(figure['mean'], 2)}, most {figure['max']:g} of the {figure['bound']} versions allowed"
    if figure.get("bound_mean") in (None, figure["bound"]):
        return text
    return f"{text}; the bound was {number(figure['bound_mean'], 1)} on average, {figure['bound_last']} at the end"


def _responses(summary: Mapping[str, Any]) -> str | None:
    """Said where some failed: their groups may have trained all the same."""
    counts = summary["trajectories"]
    if not counts.get("failed"):
        return None
    reasons = sorted((at(summary, "scoring", "reasons") or {}).items(), key=lambda reason: -reason[1])
    why = f": {reasons[0][1]} × {reasons[0][0]}" + (", …" if len(reasons) > 1 else "") if reasons else ""
    return f"{counts['generated']} generated, {counts['failed']} failed{why}"


def _groups(samples: Mapping[str, Any]) -> str:
    ends = [f"{samples[end]} {end.replace('_', ' ')}" for end in ENDS if samples.get(end)]
    return ", ".join([f"{samples['dispatched']} dispatched", f"{samples['trained']} trained", *ends])


def _sync(sync: Mapping[str, Any]) -> str | None:
    pause = at(sync, "pause_ms", "p50")
    if pause is None:
        return None
    verified = "verified" if sync.get("verified") else "NOT verified"
    if unanswered := sync.get("unanswered"):
        verified += f" ({unanswered} times a server was lost before it could be compared)"
    return f"{sync['count']} updates, {verified}; a server paused {number(pause, 1)} ms for each (median)"
