"""What may change between the starts of one run, and what may not. Pure.

A resumed run goes on with the ledger, the journal and the checkpoint of the one before, which mean what they meant only under the
same values of FIXED, and with a greedy response to each prompt, or a teacher, or without. Everything else may change, and is
said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import Config

FIXED: Mapping[str, str] = {
    "seed": "the prompt order and every sample are drawn from it",
    "model.path": "the checkpoint holds this model's weights",
    "model.tokenizer": "queued samples are tokens of this tokenizer",
    "model.dtype": "queued log-probs were computed in this precision",
    "data.train": "the ledger names prompts by their rows in it",
    "data.shuffle": "it is part of the prompt order",
    "rollout.group_size": "queued groups have this many members",
    "rollout.temperature": "queued log-probs are of the distribution at this temperature",
    "algorithm.reference.path": "the divergence of the steps so far was measured from it",
    "algorithm.reference.refresh_every": "it decides whether the checkpoint holds the reference",
    "training.groups_per_step": "finished steps are counted in batches of this size",
    "training.publish_every": "policy versions are counted by it",
    "queue.durability": "what the ledger and the journal hold follows from it",
}


@dataclass(frozen=True)
class Change:
    """A key whose value is another now. `reason`: why it may not be, or None."""

    key: str
    before: Any
    now: Any
    reason: str | None = None

    def __str__(self) -> str:
        what = f"{self.key} was {_text(self.before)} and is {_text(self.now)}"
        return f"{what}, but {self.reason}: set it back, or start a new run in another folder" if self.reason else what


def changes(before: Config, now: Config) -> list[Change]:
    """Every key with another value, in the order of the file. Mappings are compared key by key, lists as a whole."""
    found = []
    for key, old, new in _differences("", before.to_mapping(), now.to_mapping()):
        found.append(Change(key, old, new, FIXED.get(key) or _lacking(key, before, now)))
    return found


def _lacking(key: str, before: Config, now: Config) -> str | None:
    """One advantage may take another's place as long as queued groups hold what it needs."""
    earlier, later = before.algorithm.advantage.needs, now.algorithm.advantage.needs
    if key != "algorithm.advantage.name" or (earlier.greedy, earlier.teacher) == (later.greedy, later.teacher):
        return None
    return "queued groups have a greedy response or a teacher's log-probs only where the advantage needed them"


def _differences(prefix: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before != now:
            yield prefix, before, now
        return
    for name in dict.fromkeys((*before, *now)):
        key = f"{prefix}.{name}" if prefix else name
        yield from _differences(key, before.get(name), now.get(name))


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
