"""Admission: how many prompt groups may start now. Pure functions of plain values.

Two budgets: the staleness bound, in groups (`may_start`), and rollout.max_concurrent, in trajectories (`groups_that_fit`).
"""

from __future__ import annotations


def may_start(
    confirmed: int | None,
    max_staleness: int,
    publish_every: int,
    finished_steps: int,
    total_steps: int,
    groups_per_step: int,
    live: int,
) -> int:
    """(min((v + 1 + η)·P, steps) − b)·G − live, at least 0.

    The step that takes the youngest live group begins when (b·G + live) / G steps are finished, at most (v + 1 + η)·P − 1, so its
    version is at most v + η: a token sampled from now on, by version v or a newer one, is at most η versions old in it.

    confirmed: v, the version that every server taking traffic has confirmed, None before there is one (then nothing starts);
    finished_steps: b; live: groups started and without an end.
    """
    if confirmed is None:
        return 0
    last_step = min((confirmed + 1 + max_staleness) * publish_every, total_steps)
    return max(0, (last_step - finished_steps) * groups_per_step - live)


def groups_that_fit(free: int, group_size: int, max_concurrent: int) -> int:
    """Groups that `free` of `max_concurrent` places have room for. group_size: of all members, a greedy response included.

    A group takes one place per member. A group larger than all places starts alone, when every place is free, and runs in parts.
    """
    if group_size > max_concurrent:
        return 1 if free == max_concurrent else 0
    return max(0, free) // group_size


def parts_of_group(group_size: int, max_concurrent: int) -> list[range]:
    """The members of a group, cut into parts that have a place each."""
    part = min(group_size, max_concurrent)
    return [range(first, min(first + part, group_size)) for first in range(0, group_size, part)]


def places_left_for_evaluation(free: int, startable_groups: int, group_size: int) -> int:
    """Places that no group waits for: `startable_groups` may start by the bound and have data."""
    return max(0, free - startable_groups * group_size)
