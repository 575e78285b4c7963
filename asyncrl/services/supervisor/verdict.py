"""Which failure is the cause. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.services.supervisor.runtime import RowFailed


def root_cause(failures: Sequence[RowFailed]) -> RowFailed:
    """Of failures seen within a moment of each other, the one to name: a lost process before a service that raised, because
    peers of a lost process raise too (a broken collective, a silent queue); then the first seen."""
    assert failures, "no failure, no cause"
    return next((failure for failure in failures if failure.lost), failures[0])
