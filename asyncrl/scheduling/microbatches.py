"""Cut sequences into micro-batches under a token budget, equal in number on every rank."""

from __future__ import annotations

from collections.abc import Sequence

MicroBatch = tuple[int, ...]
"""Indices of the sequences of one forward pass; empty where a rank has nothing left to do but must keep step."""


def plan_microbatches(lengths: Sequence[int], *, budget_tokens: int, ranks: int) -> list[list[MicroBatch]]:
    """One list of micro-batches per rank.

    Every sequence is in exactly one micro-batch. A micro-batch costs its number of sequences times its longest length (padding
    included) and stays within `budget_tokens`, unless it is a single sequence that alone exceeds it. All ranks get the same
    number, at least one; micro-batches that ranks run at the same time cost about the same. The plan depends on the arguments
    alone.
    """
    cuts = _fill(lengths, budget_tokens)
    wanted = max(1, -(-len(cuts) // ranks)) * ranks
    while len(cuts) < wanted:
        largest = max(range(len(cuts)), key=lambda cut: _cost(cuts[cut], lengths) * (len(cuts[cut]) > 1), default=None)
        if largest is None or len(cuts[largest]) < 2:
            cuts += [()] * (wanted - len(cuts))
            break
        whole = cuts.pop(largest)
        half = len(whole) // 2
        cuts += [whole[:half], whole[half:]]
    cuts.sort(key=lambda cut: (-_cost(cut, lengths), cut))
    plan: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for number, cut in enumerate(cuts):
        row, column = divmod(number, ranks)
        plan[column if row % 2 == 0 else ranks - 1 - column].append(cut)
    return plan


def _fill(lengths: Sequence[int], budget_tokens: int) -> list[MicroBatch]:
    """Longest first, each micro-batch filled up to the budget; the first of each sets its padded length."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    cuts, start = [], 0
    while start < len(order):
        room = max(1, budget_tokens // max(1, lengths[order[start]]))
        cuts.append(tuple(order[start : start + room]))
        start += room
    return cuts


def _cost(cut: MicroBatch, lengths: Sequence[int]) -> int:
    """Padded tokens."""
    return len(cut) * max((lengths[index] for index in cut), default=0)
