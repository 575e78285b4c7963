"""The trainer's files in the run directory, one JSON object a line, flushed once per step.

batches.jsonl   {"step", "version", "groups": [ids of those that trained], "token_versions": {"min", "max"} or null}
metrics.jsonl   {"step", "version", "reward/mean", …}: flat names, numbers
samples.jsonl   one trajectory a line, for `asyncrl samples`: {"step", "id": "epoch/row/attempt/member", "state": "trained" |
                "failed", "reason": text, "reward": number or null, "prompt": text or chat messages, "response",
                "finish_reason", "ground_truth", "versions": {"min", "max"} or null}. Of each step's trained trajectories the
                first members of its groups, in turn, up to tracking.samples_per_step; of those that failed in scoring, all.
                `state` "failed" is a member without a reward, and `reason` says why.

Steps count from 1; versions are policy versions. A number that JSON cannot hold (NaN, inf) is written as null. A start that goes
on after a step first cuts what lies beyond it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from asyncrl.checkpoint.durable import sync
from asyncrl.messages import ScoredGroup
from asyncrl.services.json_lines import is_up_to, keep_lines
from asyncrl.services.trainer.figures import TrainedTokens

NAMES = ("batches", "metrics", "samples")
LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY  # what is not finite becomes null


class Records:
    """Open until `close`; appends."""

    def __init__(self, run_dir: Path, *, samples_per_step: int, last_step: int = 0):
        """last_step: lines of later steps, of an earlier life of the run, are cut."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir, self._samples_per_step = run_dir, samples_per_step
        for name in NAMES:
            keep_lines(run_dir / f"{name}.jsonl", is_up_to(last_step))
        self._files: dict[str, BinaryIO] = {name: (run_dir / f"{name}.jsonl").open("ab") for name in NAMES}

    def batch(self, step: int, version: int, trained: Sequence[ScoredGroup], tokens: TrainedTokens) -> None:
        versions = None if tokens.versions is None else {"min": tokens.versions[0], "max": tokens.versions[1]}
        line = {"step": step, "version": version, "groups": [str(group.id) for group in trained], "token_versions": versions}
        self._write("batches", [line])

    def metrics(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._write("metrics", [{"step": step, "version": version, **metrics}])

    def samples(self, step: int, trained: Sequence[ScoredGroup], taken: Sequence[ScoredGroup]) -> None:
        """trained: those of this step; taken: those plus the filtered, whose unscored members are kept too."""
        lines = [_sample(step, group, place, "trained") for group, place in self._chosen(trained)]
        lines += [
            _sample(step, group, place, "failed")
            for group in taken
            for place, failure in enumerate(group.failures)
            if failure is not None
        ]
        self._write("samples", lines)

    def sync(self) -> None:
        """What was written survives a power cut when this returns. Raises OSError."""
        for file in self._files.values():
            os.fsync(file.fileno())
        sync(self._run_dir)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _chosen(self, groups: Sequence[ScoredGroup]) -> Iterator[tuple[ScoredGroup, int]]:
        """(group, place of the member) of the trained trajectories to keep: one member of each group, then a second of each, …"""
        scored = [(group, [place for place, r in enumerate(group.rewards.tolist()) if math.isfinite(r)]) for group in groups]
        left = self._samples_per_step
        for turn in range(max((len(places) for _, places in scored), default=0)):
            for group, places in scored:
                if left and turn < len(places):
                    left -= 1
                    yield group, places[turn]

    def _write(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if lines:
            self._files[name].write(b"".join(orjson.dumps(line, option=LINE) for line in lines))
            self._files[name].flush()


def _sample(step: int, group: ScoredGroup, place: int, state: str) -> dict[str, Any]:
    lengths = group.lengths[: place + 1].tolist()
    versions = group.versions[sum(lengths[:-1]) : sum(lengths)]
    baseline = {} if group.greedy is None else {"greedy_reward": group.greedy.reward}
    return {
        "step": step,
        "id": str(group.id.member(int(group.members[place]))),
        "state": state,
        "reason": group.failures[place] or "",
        "reward": float(group.rewards[place]),
        **baseline,
        "prompt": group.prompt,
        "response": group.responses[place],
        "finish_reason": group.finish_reasons[place],
        "ground_truth": group.ground_truth,
        "versions": {"min": int(np.minimum.reduce(versions)), "max": int(np.maximum.reduce(versions))} if len(versions) else None,
    }
