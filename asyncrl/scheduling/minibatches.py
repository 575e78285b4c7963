"""The order of a step's groups, and their cut into mini-batches, one optimizer update each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from asyncrl.messages import GroupId


def batch_order(seed: int) -> Callable[[GroupId], bytes]:
    """Sort key of a step's groups: a hash of (seed, id), so that a batch's order depends on which groups are in it alone, not on
    their arrival, and no group's place depends on its row."""

    def key(id: GroupId) -> bytes:
        return hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=16).digest()

    return key


def cut_minibatches(num_groups: int, mini_batches: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive indices 0 … num_groups − 1, in parts that differ by one group at most, larger ones first.

    A batch of fewer groups than `mini_batches` gives one part per group; none at all gives no part.
    """
    parts = min(num_groups, mini_batches)
    cuts, start = [], 0
    for part in range(parts):
        size = num_groups // parts + (part < num_groups % parts)
        cuts.append(tuple(range(start, start + size)))
        start += size
    return tuple(cuts)
