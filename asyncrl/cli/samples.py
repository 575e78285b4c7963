"""`samples`: what a run's model wrote, from two files in its directory.

samples.jsonl          by the trainer: some of each step's trained trajectories, and those that scoring left without a reward
failed_samples.jsonl   by the Reward front: trajectories of groups that failed before the trainer saw them; of no step
"""

from __future__ import annotations

import json
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.cli.words import print_json, visible
from asyncrl.errors import UserError
from asyncrl.pipeline.run_folder import RunFolder

TRAINERS_FILE, FRONTS_FILE = "samples.jsonl", "failed_samples.jsonl"
STATES = ("trained", "failed")


def samples(run: Path, *, state: str | None, limit: int, step: int | None, as_json: bool) -> int:
    """Print the newest `limit` samples that match, oldest first. The Reward front's are shown when failed ones are asked for."""
    if state is not None and state not in STATES:
        raise UserError(f"--state is {state}, but must be {' or '.join(STATES)}")
    folder = RunFolder.open(run)
    before_training, trainers = folder.path / FRONTS_FILE, _read(folder.path / TRAINERS_FILE)
    source = chain(_read(before_training), trainers) if state == "failed" else trainers
    found = list(deque((sample for sample in source if _matches(sample, state, step)), maxlen=limit))
    if as_json:
        print_json({"run_dir": str(run), "samples": found})
        return 0
    for sample in found:
        print(sample_text(sample))
    if not found:
        print(f"no {state or 'kept'} sample{'' if step is None else f' of step {step}'} in {run}")
    if state is None and before_training.exists():
        print(f"groups failed before the trainer saw them: asyncrl samples {run} --state failed")
    return 0


def sample_text(sample: Mapping[str, Any]) -> str:
    """One sample as text: a heading with its figures, then prompt, response and what was right."""
    figures = ["" if sample.get("step") is None else f"step {sample['step']}", str(sample.get("id", ""))]
    if sample.get("reward") is not None:
        figures.append(f"reward {sample['reward']:g}")
    if sample.get("versions"):
        oldest, newest = sample["versions"]["min"], sample["versions"]["max"]
        figures.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    if sample.get("state") == "failed":
        figures.append(f"failed: {sample.get('reason')}")
    lines = [visible(f"── {', '.join(part for part in figures if part)}")]
    for name, value in (("prompt", _said(sample.get("prompt"))), ("response", sample.get("response"))):
        lines.append(_indented(name, value))
    if sample.get("ground_truth") is not None:
        lines.append(_indented("truth", _said(sample["ground_truth"])))
    return "\n".join(lines)


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; of a live run the last one may still be under way."""
    try:
        stream = file.open(encoding="utf-8")
    except FileNotFoundError:
        return
    with stream:
        for line in stream:
            try:
                sample = json.loads(line)
            except ValueError:
                continue
            if isinstance(sample, dict):
                yield sample


def _matches(sample: Mapping[str, Any], state: str | None, step: int | None) -> bool:
    return (state is None or sample.get("state") == state) and (step is None or sample.get("step") == step)


def _said(value: Any) -> str:
    """Text as it is; chat messages a line each; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        return "\n".join(f"{message['role']}: {message.get('content')}" for message in value)
    return json.dumps(value, ensure_ascii=False)


def _indented(name: str, value: Any) -> str:
    text = textwrap.indent(visible(str(value)), " " * 10)
    return f"{name.ljust(8)}  {text[10:]}"
