"""Generation does not stop for new weights: a 100 MB random model, 16 streams of 256 tokens, one server process.

- decode rate during a transfer throttled to last 3 s ≥ 80 % of the rate without one;
- pause (the decode loop held), p50 of 20 updates, ≤ 1.5 × a memory copy of the model + 20 ms, and when the transfer is throttled
  tenfold ≤ 1.2 × that pause + 5 ms;
- a response holds at least 3 versions, and under `recompute` every token's log-prob is transformers' under its version's weights;
- a byte flipped on the way: not committed, the server STALE, the slice sent again, `verified` honest.

This process is trainer and ParameterSync; the server is a process of its own (`--serve FOLDER`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp
import torch
import zmq
from transformers import AutoModelForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.engines.embedded import EngineOptions
from asyncrl.protocols.weights import KvPolicy
from asyncrl.services.inference import InferenceServer
from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
from asyncrl.transport.rpc import RpcClient
from asyncrl.weight_sync.channel import Carrier, ReceiverChannel, staged_line
from asyncrl.weight_sync.plan import bucket_bytes
from asyncrl.weight_sync.publisher import ShmPublisher
from asyncrl.weight_sync.receiver import WeightReceiver
from asyncrl.weight_sync.wire import unpack
from tests.models import tiny_model

NAME = "inference/0"
STREAMS, TOKENS = 16, 256
TRANSFER_SECONDS = 3.0
UPDATES, CONTEXT = 20, 320
PROMPT = list(range(2, 18))
LIMITS = {"decode_rate": 0.8, "log_prob": 1e-4, "versions": 3}


def make_model(folder: Path, context: int = CONTEXT) -> Path:
    """Qwen2, 25 M parameters, float32; weights of an ordinary width, so that rounding stays ordinary."""
    tiny_model(folder, hidden=512, layers=8, context=context)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.15)
    model.save_pretrained(folder)
    return folder


class Trainer:
    """The model as a trainer holds it. `become(v)` gives it version v's weights, a function of v alone."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False).eval()
        self.parameters = dict(self.model.named_parameters())
        self._base = {name: parameter.clone() for name, parameter in self.parameters.items()}
        self.num_bytes = sum(parameter.numel() * 4 for parameter in self.parameters.values())

    def become(self, version: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self._base[name]).mul_(1 + 0.03 * version)

    def copy_seconds(self) -> float:
        """A memory copy of the model, median of 5."""
        into = {name: torch.empty_like(parameter).zero_() for name, parameter in self.parameters.items()}
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            for name, parameter in self.parameters.items():
                into[name].copy_(parameter)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def log_probs(self, version: int, prompt: list[int], response: list[int]) -> torch.Tensor:
        """Of every response token, under version's weights, by one forward pass."""
        self.become(version)
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@dataclass
class Sync:
    """ParameterSync and one publisher; versions begin at 0, which is confirmed already."""

    service: ParameterSyncService
    publisher: ShmPublisher
    version: int = 0

    async def publish(self) -> None:
        """The trainer's weights as the next version, until the server has confirmed it."""
        await self.stage()
        assert await asyncio.to_thread(self.publisher.wait_confirmed, self.version, 120.0), self.service.status()

    async def stage(self) -> None:
        self.version += 1
        slot = await asyncio.to_thread(self.publisher.acquire, self.version)
        await asyncio.to_thread(self.publisher.stage, self.version, slot)

    def figures(self) -> dict[str, Any]:
        return dict(self.service.summary()["sync"])


class Server:
    """The server process, its client, and the trainer that publishes to it."""

    def __init__(self, addresses: dict[str, str], trainer: Trainer, http: aiohttp.ClientSession):
        self.addresses, self.trainer, self._http = addresses, trainer, http
        self._rpc = RpcClient(addresses["rpc"])
        self._incarnation = 0

    async def tokens(self) -> int:
        return int((await self._rpc.call("status", timeout=30))["tokens"])

    async def generate(self, streams: int = STREAMS, tokens: int = TOKENS) -> list[dict[str, Any]]:
        sampling = {"n": streams, "max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 7}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        async with self._http.post(self.addresses["http"] + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            answers: list[dict[str, Any]] = await response.json()
            return answers

    async def begin_generating(self) -> asyncio.Task[list[dict[str, Any]]]:
        """16 streams, past their first tokens."""
        before, task = await self.tokens(), asyncio.create_task(self.generate())
        await self.until_tokens(before + 8 * STREAMS, task)
        return task

    async def until_tokens(self, count: int, generating: asyncio.Task[Any]) -> None:
        """Until the server has made so many tokens in all; AssertionError when the responses end before."""
        for _ in range(10_000):
            if await self.tokens() >= count:
                return
            assert not generating.done(), "the responses ended too soon"
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def syncing(
        self,
        *,
        bytes_per_second: float | None = None,
        kv_policy: KvPolicy = "keep",
        carrier: Carrier = "shared_memory",
        weights: str | None = None,
    ) -> AsyncIterator[Sync]:
        """A new start of the trainer, with settings of its own."""
        self._incarnation += 1
        most = bucket_bytes(16, None if bytes_per_second is None else bytes_per_second / 1e6)
        settings = SyncSettings(
            transport=carrier, kv_policy=kv_policy, bucket_bytes=most, bytes_per_second=bytes_per_second, timeout_seconds=120
        )
        service = ParameterSyncService(settings, connect=staged_line, clock=SystemClock())
        address = (await service.start())["rpc"]
        running = asyncio.create_task(service.run({NAME: {"weights": weights or self.addresses["weights"]}}))
        publisher = ShmPublisher(
            self.trainer.parameters.items(), run_id=f"benchmark{os.getpid()}", address=address, incarnation=self._incarnation,
            bucket_bytes=most, timeout_seconds=60, wire_dtype="float32",
        )  # fmt: skip
        sync = Sync(service, publisher, version=-1)
        try:
            await asyncio.to_thread(publisher.register)
            await sync.publish()
            yield sync
        finally:
            await asyncio.to_thread(publisher.close)
            await service.stop()
            await running

    async def close(self) -> None:
        await self._rpc.call("stop", timeout=10)
        await self._rpc.close()


async def decode_rates(server: Server, pairs: int) -> tuple[list[float], list[float]]:
    """Tokens per second without a transfer and during one of 3 s, in turn, over the same part of the same responses."""
    without, during = [], []
    async with server.syncing(bytes_per_second=server.trainer.num_bytes / TRANSFER_SECONDS) as sync:
        for _ in range(pairs):
            for rates in (without, during):
                generating = await server.begin_generating()
                tokens, began = await server.tokens(), time.monotonic()
                if rates is during:
                    await sync.publish()
                    assert time.monotonic() - began >= 0.95 * TRANSFER_SECONDS
                else:
                    await asyncio.sleep(TRANSFER_SECONDS)
                assert not generating.done(), "the responses ended before the transfer"
                rates.append((await server.tokens() - tokens) / (time.monotonic() - began))
                await generating
    return without, during


async def pauses(server: Server, bytes_per_second: float | None) -> dict[str, Any]:
    """The figures of 20 updates while 16 streams run; and the most versions that one response saw."""
    versions = 0
    async with server.syncing(bytes_per_second=bytes_per_second) as sync:
        generating = await server.begin_generating()
        for number in range(UPDATES):
            server.trainer.become(number % 7)
            await sync.publish()
            if generating.done():
                versions = max(versions, most_versions(await generating))
                generating = await server.begin_generating()
        versions = max(versions, most_versions(await generating))
        figures = sync.figures()
    assert figures["count"] == UPDATES
    return {**figures, "versions": versions}


def most_versions(answers: list[dict[str, Any]]) -> int:
    return max(len({span["version"] for span in answer["meta_info"]["weight_versions"]}) for answer in answers)


async def recomputed_log_probs(server: Server) -> tuple[int, float]:
    """(versions in the response that saw most, largest |ours − transformers'| over every token of every response)."""
    server.trainer.become(0)
    async with server.syncing(kv_policy="recompute") as sync:
        before, generating = await server.tokens(), asyncio.create_task(server.generate(4, 128))
        for step in range(1, 5):
            await server.until_tokens(before + step * 4 * 20, generating)
            server.trainer.become(step)
            await sync.publish()
        answers = await generating
        worst = 0.0
        for answer in answers:
            ids, meta = answer["output_ids"], answer["meta_info"]
            ours = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
            for span in meta["weight_versions"]:
                version = int(span["version"].split(".")[1])
                theirs = server.trainer.log_probs(version, PROMPT, ids)
                part = slice(span["start"], span["end"])
                worst = max(worst, float((ours[part] - theirs[part]).abs().max()))
    return most_versions(answers), worst


class Tamperer:
    """Stands between ParameterSync and the receiver. Once armed it flips one byte of the third bucket, and stops everything when
    a bucket comes a second time (`resending`), until `let_go`."""

    def __init__(self, weights: str):
        self._context = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._front.bind("tcp://127.0.0.1:*")
        self._back.connect(weights)
        self.address = self._front.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.armed, self.resending, self.let_go, self._stop = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller, peer, seen = zmq.Poller(), b"", set[int]()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(20))
            if self._back in ready:
                self._front.send_multipart([peer, *self._back.recv_multipart()])
            if self._front in ready:
                peer, *frames = self._front.recv_multipart()
                if self.armed.is_set() and len(frames) == 2:
                    self._tamper(frames, unpack(frames[0])["first"], seen)
                self._back.send_multipart(frames)

    def _tamper(self, frames: list[bytes], first: int, seen: set[int]) -> None:
        if first in seen:
            self.resending.set()
            assert self.let_go.wait(30)
        seen.add(first)
        if len(seen) == 3 and not self.resending.is_set():
            frames[1] = frames[1][:1000] + bytes([frames[1][1000] ^ 1]) + frames[1][1001:]


async def flipped_byte(server: Server) -> dict[str, bool]:
    """What became of a version of which one byte changed on the way, over ZeroMQ."""
    tamperer, direct = Tamperer(server.addresses["weights"]), ReceiverChannel(server.addresses["weights"])
    checks = {}
    async with server.syncing(carrier="zeromq", weights=tamperer.address) as sync:
        before = (await direct.status(10))["committed"]
        tamperer.armed.set()
        await sync.stage()
        assert await asyncio.to_thread(tamperer.resending.wait, 30), "nothing was sent again"
        checks["not_committed"] = (await direct.status(10))["committed"] == before
        checks["stale"] = sync.service.status()["servers"] == {NAME: "STALE"}
        tamperer.let_go.set()
        checks["resent"] = await asyncio.to_thread(sync.publisher.wait_confirmed, sync.version, 60.0)
        figures = sync.figures()
        checks["ready"] = sync.service.status()["servers"] == {NAME: "READY"}
        checks["counted"] = figures["refused_slices"] == 1
        checks["verified"] = figures["verified"] is True
    await direct.close()
    tamperer.close()
    return checks


async def measure(server: Server, pairs: int) -> dict[str, Any]:
    copy_ms = server.trainer.copy_seconds() * 1e3
    without, during = await decode_rates(server, pairs)
    rate, baseline = statistics.median(during), statistics.median(without)
    print(f"decode: {baseline:,.0f} tokens/s without a transfer, {rate:,.0f} during one of {TRANSFER_SECONDS:g} s", flush=True)
    fast = await pauses(server, None)
    slow_rate = server.trainer.num_bytes / (10 * fast["transfer_ms"]["p50"] / 1e3)
    slow = await pauses(server, slow_rate)
    for name, figures in (("full speed", fast), ("a tenth of it", slow)):
        print(f"{name}: transfer {figures['transfer_ms']['p50']:.0f} ms, pause {figures['pause_ms']} ms", flush=True)
    print(f"a memory copy of the model: {copy_ms:.1f} ms", flush=True)
    versions, worst = await recomputed_log_probs(server)
    print(f"recompute: {versions} versions in a response, log-probs off by at most {worst:.1e}", flush=True)
    flipped = await flipped_byte(server)
    print(f"a byte flipped on the way: {flipped}", flush=True)
    fast_pause, slow_pause = fast["pause_ms"]["p50"], slow["pause_ms"]["p50"]
    return {
        "decode_rate": check(rate / baseline, at_least=LIMITS["decode_rate"]),
        "pause_ms": check(fast_pause, at_most=1.5 * copy_ms + 20),
        "throttled_pause_ms": check(slow_pause, at_most=1.2 * fast_pause + 5),
        "versions_in_a_response": check(max(versions, fast["versions"]), at_least=LIMITS["versions"]),
        "recomputed_log_prob_error": check(worst, at_most=LIMITS["log_prob"]),
        "verified": {"ok": fast["verified"] and slow["verified"]},
        "flipped_byte": {**flipped, "ok": all(flipped.values())},
        "rates": {"ours": rate, "baseline": baseline, "ok": True},
    }


def check(value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    limit = at_least if at_least is not None else at_most
    assert limit is not None
    ok = value >= limit if at_least is not None else value <= limit
    return {"value": float(f"{value:.4g}"), "limit": float(f"{limit:.4g}"), "ok": ok}


async def benchmark(pairs: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks.sync", "--serve", folder, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            addresses = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
                server = Server(addresses, Trainer(Path(folder)), http)
                checks = await measure(server, pairs)
                await server.close()
            await asyncio.wait_for(process.wait(), 30)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    rates, ratio = checks.pop("rates"), checks["decode_rate"]["value"]
    ok = all(outcome["ok"] for outcome in checks.values())
    line = {"name": "sync", "ratio": ratio, "ours": round(rates["ours"]), "baseline": round(rates["baseline"])}
    print(json.dumps({**line, "limit": LIMITS["decode_rate"], "ok": ok, "checks": checks}))
    return 0 if ok else 1


async def serve(folder: str) -> int:
    server = InferenceServer(NAME, folder, EngineOptions(context_tokens=CONTEXT, max_batch=STREAMS), make_receiver=WeightReceiver)
    print(json.dumps(await server.start()), flush=True)
    await server.run({})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=3, help="measurements of the decode rate, with and without a transfer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return asyncio.run(serve(arguments.serve) if arguments.serve else benchmark(arguments.pairs))


if __name__ == "__main__":
    raise SystemExit(main())
