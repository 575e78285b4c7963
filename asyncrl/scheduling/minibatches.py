"""Cut a step's groups into mini-batches, one optimizer update each."""

from __future__ import annotations


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
