"""Asynchrony pays: generation and training of about equal cost, on one core each.

- bound 2 makes ≥ 1.5 × the steps per second of bound 0, in the same pipeline otherwise;
- bound 0, where the two take turns, costs ≤ 1.15 × generation plus training timed alone.

The model is random and large enough that engine and trainer take ≥ 85 % of the CPU, which is checked too. Timed alone:
the embedded engine generates the same groups in a server process of its own, with no pipeline round it; FSDP2 trains the same
batches in this process, with nothing else running. Steps are timed between the first and the last of the middle ones.
Three rounds of all four, one after the other; the ratios are taken within a round, and their median is judged.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.config.schema import Config
from asyncrl.engines.client import FleetClient
from asyncrl.engines.fsdp import FsdpLauncher
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.protocols import FleetView, GenerateRequest, MemberRequest, SamplingParams, ServerView, TrainBatch
from tests.models import tiny_model

GROUPS, MEMBERS, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 8, 48
WARM_STEPS = 4
LIMITS = {"speed_up": 1.5, "bound_0_cost": 1.15, "compute_share": 0.85}


def parity(response: str) -> float:
    """Some responses good, some bad, whatever the model does."""
    return float(zlib.crc32(response.encode()) % 2)


def make_model(folder: Path) -> Path:
    """Qwen2, about 10 M parameters, float32, weights of an ordinary width."""
    tiny_model(folder, hidden=384, layers=8, context=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return folder


def pipeline(model: Path, *, bound: int, steps: int) -> asyncrl.Pipeline:
    prompts = [{"prompt": (f"{number:04d}" * PROMPT_TOKENS)[:PROMPT_TOKENS]} for number in range(512)]
    for row in prompts:
        row["sampling"] = {"ignore_eos": True}  # type: ignore[assignment]
    return asyncrl.Pipeline(
        name=f"overlap-{bound}",
        model={"path": str(model)},
        prompts=prompts,
        reward=parity,
        rollout={
            "group_size": MEMBERS,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": RESPONSE_TOKENS,
            "max_staleness": bound,
        },
        training={"steps": steps, "groups_per_step": GROUPS, "filter": "keep", "learning_rate": 1e-5},
        tracking={"mlflow": None},
    )


def time_pipeline(model: Path, folder: Path, *, bound: int, steps: int) -> dict[str, float]:
    """Seconds a step, and the share of the CPU that engine and trainer took meanwhile."""
    run = pipeline(model, bound=bound, steps=steps).launch(folder, progress=False)
    watch = _CpuWatch(folder, first=WARM_STEPS, last=steps - 2)
    summary = run.wait()
    assert summary["status"] == "finished", summary["error"]
    return watch.result()


class _CpuWatch:
    """Reads the processes' CPU seconds when step `first` and step `last` are written."""

    def __init__(self, folder: Path, *, first: int, last: int):
        self._folder, self._first, self._last = folder, first, last
        self._readings: list[tuple[float, int, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        deadline = time.monotonic() + 600
        for step in (self._first, self._last):
            while (seen := self._steps()) < step and time.monotonic() < deadline:
                time.sleep(0.005)
            self._readings.append((time.monotonic(), seen, self._cpu_seconds()))

    def _steps(self) -> int:
        path = self._folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @staticmethod
    def _cpu_seconds() -> float:
        """Of the trainer and the server: the two processes of this tree that used the most."""
        used = []
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
                used.append(times.user + times.system)
            except psutil.NoSuchProcess:
                continue
        return sum(sorted(used)[-2:])

    def result(self) -> dict[str, float]:
        self._thread.join(5)
        (t0, s0, c0), (t1, s1, c1) = self._readings
        return {"step_s": (t1 - t0) / (s1 - s0), "compute_cores": (c1 - c0) / (t1 - t0)}


def time_generation(model: Path, rounds: int) -> float:
    """Seconds for one step's groups on a server of its own."""
    command = [sys.executable, "-m", "asyncrl.cli", "serve", str(model), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        return asyncio.run(_generate(url, rounds))
    finally:
        server.terminate()
        server.wait(20)


async def _generate(url: str, rounds: int) -> float:
    client = FleetClient(FleetView(1, 0, 0, 0, (ServerView("inference/0", url, "READY", 0),)))
    sampling = SamplingParams(max_new_tokens=RESPONSE_TOKENS, ignore_eos=True)

    async def group(round_: int, number: int) -> None:
        tokens = np.random.default_rng((round_, number)).integers(2, 60, PROMPT_TOKENS).astype(np.int32)
        members = tuple(MemberRequest(m, f"{round_}-{number}-{m}", m) for m in range(MEMBERS))
        async for completions in client.generate(GenerateRequest(tokens, members, sampling, 120)):
            assert not any(completion.failure for completion in completions), completions

    seconds = []
    for round_ in range(rounds + 2):
        began = time.perf_counter()
        await asyncio.gather(*(group(round_, number) for number in range(GROUPS)))
        seconds.append(time.perf_counter() - began)
    await client.close()
    return statistics.median(seconds[2:])


def time_training(config: Config, model: Path, rounds: int) -> float:
    """Seconds for one step's update."""
    launcher = FsdpLauncher(config, model_path=model, rank=0)
    launcher.prepare()
    engine = launcher.join("")
    seconds = []
    for round_ in range(rounds + 2):
        batch = TrainBatch(round_ + 1, round_, 1e-5, tuple(_group(round_, n) for n in range(GROUPS)), (tuple(range(GROUPS)),))
        began = time.perf_counter()
        engine.train(batch)
        seconds.append(time.perf_counter() - began)
    engine.close()
    return statistics.median(seconds[2:])


def _group(round_: int, number: int) -> ScoredGroup:
    random = np.random.default_rng((round_, number))
    total = MEMBERS * RESPONSE_TOKENS
    return ScoredGroup(
        id=GroupId(round_, number, 0),
        group_size=MEMBERS,
        start_version=round_,
        prompt_tokens=random.integers(2, 60, PROMPT_TOKENS).astype(np.int32),
        members=np.arange(MEMBERS, dtype=np.int32),
        lengths=np.full(MEMBERS, RESPONSE_TOKENS, np.int32),
        response_tokens=random.integers(2, 60, total).astype(np.int32),
        loss_mask=np.ones(total, bool),
        log_probs=np.full(total, -4.0, np.float32),
        versions=np.full(total, round_, np.int32),
        rewards=(np.arange(MEMBERS) % 2).astype(np.float32),
        components={},
        finish_reasons=["length"] * MEMBERS,
        failures=[None] * MEMBERS,
        prompt="p",
        responses=["r"] * MEMBERS,
    )


@dataclass(frozen=True)
class Round:
    """Seconds, and cores that engine and trainer took at bound 2, measured one after the other."""

    generation_alone: float
    training_alone: float
    step_at_bound_0: float
    step_at_bound_2: float
    compute_cores: float

    @property
    def ratios(self) -> dict[str, float]:
        return {
            "speed_up": self.step_at_bound_0 / self.step_at_bound_2,
            "bound_0_cost": self.step_at_bound_0 / (self.generation_alone + self.training_alone),
            "compute_share": self.compute_cores / 2,
        }


def measure(folder: Path, *, steps: int) -> Round:
    model = make_model(folder / "model")
    generation = time_generation(model, rounds=8)
    bound_0 = time_pipeline(model, folder / "bound-0", bound=0, steps=steps)
    training = time_training(pipeline(model, bound=0, steps=steps).config, model, rounds=8)
    bound_2 = time_pipeline(model, folder / "bound-2", bound=2, steps=steps)
    return Round(generation, training, bound_0["step_s"], bound_2["step_s"], bound_2["compute_cores"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    rounds = []
    for _ in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure(Path(folder), steps=chosen.steps))
        print(rounds[-1], flush=True)
    report = judge(rounds)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def judge(rounds: list[Round]) -> dict[str, Any]:
    """By the median over the rounds, of ratios within each: a machine's speed is not the same all the time."""
    found = {name: statistics.median(each.ratios[name] for each in rounds) for name in LIMITS}
    checks = [
        _check("speed_up", found["speed_up"], found["speed_up"] >= LIMITS["speed_up"]),
        _check("bound_0_cost", found["bound_0_cost"], found["bound_0_cost"] <= LIMITS["bound_0_cost"]),
        _check("compute_share", found["compute_share"], found["compute_share"] >= LIMITS["compute_share"]),
    ]
    return {
        "name": "overlap",
        "ratio": round(found["speed_up"], 3),
        "ours": round(statistics.median(1 / each.step_at_bound_2 for each in rounds), 3),
        "baseline": round(statistics.median(1 / each.step_at_bound_0 for each in rounds), 3),
        "limit": LIMITS["speed_up"],
        "ok": all(check["ok"] for check in checks),
        "checks": checks,
        "rounds": [{name: round(value, 4) for name, value in asdict(each).items()} for each in rounds],
    }


def _check(name: str, value: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "limit": LIMITS[name], "ok": ok}


if __name__ == "__main__":
    sys.exit(main())
