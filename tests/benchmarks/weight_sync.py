"""What an update of the weights costs a real SGLang server that is decoding 16 streams, by every way to make it, in one run.

    staged       shards into the scheduler's spare memory while it decodes, then a swap between two steps
    broadcast    pause, whole tensors through SGLang's update group (gloo), go on
    disk         pause, safetensors from a folder, go on
    abort        the field's habit: abort what runs, load from disk, and ask for every response again from its prompt

stall: the scheduler's decode loop held (staged: by its own clock; else from pause to continue, as the caller sees it).
client gap: the largest of any stream in the 0.2 s before the swap and the 0.2 s after it (abort: from its last token to the first
            that it had not had before; the median of the streams). A normal gap is the same without an update.

- staged: stall p50 ≤ 1.5 × a memory copy of the model + 20 ms; client gap p50 ≤ a normal gap + the same; and throttled tenfold
  no longer than 1.2 × that + 10 ms, over 50 updates;
- abort + resubmit, with responses of 100 tokens so far (of more it loses more): a client gap at least 10 × that of staged.

Needs SGLang (bash deploy/sglang-cpu/install.sh). ASYNCRL_SGLANG_PYTHON names another environment's Python.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp
import orjson

from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.broadcast import BroadcastCarrier
from asyncrl.weight_sync.channel import Outcome, ReceiverChannel
from asyncrl.weight_sync.endpoints import UpdateEndpoints
from asyncrl.weight_sync.http_channel import DiskCarrier, HttpChannel
from tests.benchmarks.sync import Trainer, make_model
from tests.sglang.servers import PYTHON, RunningServer, serving
from tests.waiting import until
from tests.weight_sync.stand_in import StagedModel

STREAMS, PROMPT, CONTEXT = 16, list(range(2, 18)), 2048
UPDATES, OTHER_UPDATES = 50, 10
AROUND_SECONDS = 0.2  # before a swap and after it, in which gaps are looked for
ABORTED_AT = 100  # tokens that each response has when it is aborted
TIMEOUT = 60.0
LIMITS = {"copies": 1.5, "stall_ms": 20.0, "throttled": 1.2, "throttled_ms": 10.0, "abort": 10.0}


class Stream:
    """One response under way, asked for again when it is over or was aborted; `tokens`: when each token of it came."""

    def __init__(self, server: RunningServer, http: aiohttp.ClientSession, number: int):
        self._server, self._http, self._number = server, http, number
        self.tokens: list[float] = []
        self.lost = 0  # tokens that were generated and thrown away
        self.asked = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._ask()

    async def _ask(self) -> None:
        self.asked += 1
        self.tokens = []
        sampling = {"max_new_tokens": CONTEXT - len(PROMPT) - 8, "ignore_eos": True, "temperature": 1.0, "stream_interval": 1}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "rid": f"s{self._number}-{self.asked}"}
        async with self._http.post(f"{self._server.url}/generate", json=body) as answer:
            rest = b""
            async for data in answer.content.iter_any():
                *blocks, rest = (rest + data).split(b"\n\n")
                now = time.monotonic()
                for block in blocks:
                    text = block.removeprefix(b"data:").strip()
                    if text and text != b"[DONE]":
                        event = orjson.loads(text)
                        self.tokens += [now] * (int(event["meta_info"]["completion_tokens"]) - len(self.tokens))


@dataclass
class Figures:
    """Of the updates made one way, in milliseconds."""

    stalls: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def summary(self, name: str) -> dict[str, float]:
        """What is reported, and a line of it at once."""
        found = {
            "stall_ms_p50": _p50(self.stalls),
            "transfer_ms_p50": _p50(self.transfers),
            "client_gap_ms_p50": _p50(self.gaps),
            "client_gap_ms_max": round(max(self.gaps, default=0.0), 2),
            "tokens_lost_per_update": round(statistics.fmean(self.lost), 1) if self.lost else 0.0,
            "updates": len(self.gaps),
        }
        print(f"{name:26}", *(f"{key} {value:g}" for key, value in found.items()), flush=True)
        return found


Way = Callable[[PolicyVersion], Awaitable[Outcome]]


class Bench:
    """One server, its streams, and versions for it."""

    def __init__(self, server: RunningServer, trainer: Trainer, http: aiohttp.ClientSession, folder: Path):
        self.server, self.trainer, self.folder = server, trainer, folder
        self.streams = [Stream(server, http, number) for number in range(STREAMS)]
        self.staged = StagedModel(trainer.parameters, bucket_bytes=16_000_000)
        self.http, self._version = http, 0

    async def warm(self) -> None:
        await until(lambda: all(len(stream.tokens) >= 20 for stream in self.streams), TIMEOUT)

    async def in_turn(self, number: int, ways: dict[str, Way]) -> tuple[dict[str, Figures], float]:
        """So many updates each way, one after the other, because a step takes the longer the longer the responses are; with
        the normal gap (ms) of stretches without one between them."""
        figures: dict[str, Figures] = {name: Figures() for name in ways}
        normal = []
        for _ in range(number):
            for name, make in ways.items():
                await self._room()
                await asyncio.sleep(2 * AROUND_SECONDS)
                normal.append(self._largest_gap_ms(time.monotonic() - 2 * AROUND_SECONDS))
                await self._update(make, figures[name])
        return figures, _p50(normal)

    async def _update(self, make: Way, figures: Figures) -> None:
        self._version += 1
        outcome = await make(PolicyVersion(1, self._version))
        swapped = time.monotonic() - outcome.pause_seconds
        await asyncio.sleep(AROUND_SECONDS)
        figures.stalls.append(1e3 * outcome.pause_seconds)
        figures.transfers.append(1e3 * outcome.transfer_seconds)
        figures.gaps.append(self._largest_gap_ms(swapped - AROUND_SECONDS))
        figures.lost.append(0)

    def _largest_gap_ms(self, since: float) -> float:
        """Of any stream."""
        return 1e3 * max(_largest_gap(stream.tokens, since) for stream in self.streams)

    async def aborts(self, number: int, load: Way) -> Figures:
        """Abort what runs, load, and let every stream begin anew; until each has a token more than it had."""
        figures = Figures()
        asked = [stream.asked for stream in self.streams]
        await self._abort_all()
        await until(lambda: all(stream.asked > times for stream, times in zip(self.streams, asked, strict=True)), TIMEOUT)
        for _ in range(number):
            await until(lambda: all(ABORTED_AT <= len(stream.tokens) <= CONTEXT - 300 for stream in self.streams), 4 * TIMEOUT)
            self._version += 1
            had, last = [len(stream.tokens) for stream in self.streams], [stream.tokens[-1] for stream in self.streams]
            asked = [stream.asked for stream in self.streams]
            await self._abort_all()
            outcome = await load(PolicyVersion(1, self._version))
            gaps = []
            for stream, count, before, times in zip(self.streams, had, last, asked, strict=True):
                await until(lambda s=stream, t=times, c=count: s.asked > t and len(s.tokens) > c, 4 * TIMEOUT)
                gaps.append(stream.tokens[count] - before)
            figures.stalls.append(1e3 * outcome.pause_seconds)
            figures.transfers.append(1e3 * outcome.transfer_seconds)
            figures.gaps.append(1e3 * statistics.median(gaps))
            figures.lost.append(sum(had))
        return figures

    async def _abort_all(self) -> None:
        async with self.http.post(f"{self.server.url}/abort_request", json={"abort_all": True}):
            pass

    async def _room(self) -> None:
        """No stream is near its end, where another begins."""
        await until(lambda: all(8 <= len(stream.tokens) <= CONTEXT - 300 for stream in self.streams), 4 * TIMEOUT)

    async def close(self) -> None:
        for stream in self.streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in self.streams), return_exceptions=True)
        self.staged.remove()


def _largest_gap(times: list[float], since: float) -> float:
    recent = [moment for moment in times if moment >= since]
    before = [moment for moment in times if moment < since][-1:]
    marks = [*before, *recent, time.monotonic()]
    return max((later - earlier for earlier, later in itertools.pairwise(marks)), default=0.0)


def _p50(values: list[float]) -> float:
    return round(statistics.median(values), 3) if values else 0.0


async def measure(folder: Path, updates: int, others: int) -> dict[str, Any]:
    trainer = Trainer(make_model(folder / "model", CONTEXT))
    copy_ms = 1e3 * trainer.copy_seconds()
    further = {"max-total-tokens": STREAMS * (CONTEXT + 64)}
    async with (
        serving(folder / "model", folder, context_tokens=CONTEXT, further=further) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
    ):
        bench = Bench(server, trainer, http, folder)
        receiver = ReceiverChannel(server.receiver)
        endpoints = UpdateEndpoints(server.url, token=None, timeout_seconds=TIMEOUT)
        try:
            await bench.warm()

            async def staged(version: PolicyVersion, rate: float | None = None) -> Outcome:
                return await receiver.update(
                    bench.staged.order(version, bytes_per_second=rate, verify=False, timeout_seconds=TIMEOUT)
                )

            first, _ = await bench.in_turn(5, {"staged": staged})
            slow = trainer.num_bytes / (10 * _p50(first["staged"].transfers) / 1e3)
            disk = HttpChannel(endpoints, DiskCarrier(endpoints, folder / "versions", folder / "model"), None)
            broadcast = HttpChannel(endpoints, BroadcastCarrier(endpoints, timeout_seconds=TIMEOUT), None)
            ours, normal = await bench.in_turn(
                updates, {"staged": staged, "staged_throttled_tenfold": lambda version: staged(version, slow)}
            )
            theirs, _ = await bench.in_turn(
                others,
                {
                    "disk": lambda version: disk.update(_order(bench, version)),
                    "broadcast": lambda version: broadcast.update(_order(bench, version)),
                },
            )
            aborted = await bench.aborts(others, lambda version: disk.update(_order(bench, version)))
            figures = {**ours, **theirs, "abort_and_resubmit": aborted}
            ways = {name: each.summary(name) for name, each in figures.items()}
            await broadcast._carrier.close()
            await disk._carrier.close()
        finally:
            await bench.close()
            await receiver.close()
            await endpoints.close()
    return judge(ways, copy_ms=copy_ms, normal_ms=normal, megabytes=trainer.num_bytes / 1e6)


def _order(bench: Bench, version: PolicyVersion) -> Any:
    return bench.staged.order(version, verify=False, timeout_seconds=TIMEOUT)


def judge(ways: dict[str, dict[str, float]], *, copy_ms: float, normal_ms: float, megabytes: float) -> dict[str, Any]:
    staged, slow, aborted = ways["staged"], ways["staged_throttled_tenfold"], ways["abort_and_resubmit"]
    allowed = LIMITS["copies"] * copy_ms + LIMITS["stall_ms"]

    def at_most(value: float, limit: float) -> dict[str, Any]:
        return {"value": round(value, 3), "limit": round(limit, 3), "ok": value <= limit}

    ratio = aborted["client_gap_ms_p50"] / max(staged["client_gap_ms_p50"], 1e-9)
    checks = {
        "staged_stall_ms": at_most(staged["stall_ms_p50"], allowed),
        "staged_client_gap_ms": at_most(staged["client_gap_ms_p50"], normal_ms + allowed),
        "throttled_stall_ms": at_most(
            slow["stall_ms_p50"], LIMITS["throttled"] * staged["stall_ms_p50"] + LIMITS["throttled_ms"]
        ),
        "throttled_client_gap_ms": at_most(
            slow["client_gap_ms_p50"], LIMITS["throttled"] * staged["client_gap_ms_p50"] + LIMITS["throttled_ms"]
        ),
        "abort_against_staged": {"value": round(ratio, 2), "limit": LIMITS["abort"], "ok": ratio >= LIMITS["abort"]},
    }
    return {
        "name": "weight_sync",
        "ratio": round(ratio, 2),
        "ours": staged["client_gap_ms_p50"],
        "baseline": aborted["client_gap_ms_p50"],
        "limit": LIMITS["abort"],
        "ok": all(check["ok"] for check in checks.values()),
        "checks": checks,
        "ways": ways,
        "model_megabytes": round(megabytes, 1),
        "memory_copy_ms": round(copy_ms, 2),
        "normal_gap_ms": normal_ms,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--others", type=int, default=OTHER_UPDATES, help="updates made each other way")
    chosen = parser.parse_args()
    if not PYTHON.exists():
        print(f"no SGLang at {PYTHON}: run bash deploy/sglang-cpu/install.sh", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        result = asyncio.run(measure(Path(folder), chosen.updates, chosen.others))
        print(json.dumps(result))
        return 0 if result["ok"] else 1
    return 130


if __name__ == "__main__":
    raise SystemExit(main())
