"""Real SGLang servers for tests: started as the product starts them, and spoken to as it speaks to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from asyncrl.engines.client import FleetClient
from asyncrl.engines.sglang.arguments import ServerOptions
from asyncrl.engines.sglang.process import Address, OwnServers, SglangProcess
from asyncrl.protocols import Completion, FleetView, GenerateRequest, MemberRequest, SamplingParams, ServerView
from asyncrl.transport.ports import free_port

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ASYNCRL_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
LAUNCHER = ROOT / "deploy" / "sglang-cpu" / "launch.py"
START_SECONDS = 180.0
HOST = "127.0.0.1"


def options(model: Path, **changes) -> ServerOptions:
    fields = {
        "python": str(PYTHON), "launcher": str(LAUNCHER), "model_path": str(model), "dtype": "float32", "context_tokens": 256,
        "max_batch": 32, "device": "cpu",
    }  # fmt: skip
    return ServerOptions(**(fields | changes))


class RunningServer:
    """A server that serves; `url` and `receiver` are where."""

    def __init__(self, process: SglangProcess, name: str):
        self.process, self.name = process, name
        self.model_folder = Path(process.model_path)
        self.url, self.receiver = process.address.url, str(process.address.receiver)

    def view(self, version: int | None, *, incarnation: int = 1, seq: int = 1) -> FleetView:
        server = ServerView(self.name, self.url, "READY", version)
        return FleetView(seq, incarnation, version, version, (server,))

    def client(self, version: int | None = None, *, incarnation: int = 0) -> FleetClient:
        return FleetClient(self.view(version, incarnation=incarnation), is_embedded=False)


@asynccontextmanager
async def serving(model: Path, log_folder: Path, *, name: str = "inference/0", **changes) -> AsyncIterator[RunningServer]:
    chosen = options(model, **changes)
    servers = OwnServers(chosen, log_folder / f"{name.replace('/', '-')}.log")
    await servers.examine()
    address = Address(HOST, free_port(HOST), None, f"tcp://{HOST}:{free_port(HOST)}")
    process = servers.make(address)
    try:
        await process.start(START_SECONDS)
        yield RunningServer(process, name)
    finally:
        await process.end()


def request(
    prompt: list[int], *, members: int = 1, tokens: int = 16, temperature: float = 1.0, name: str = "r", ignore_eos: bool = True
) -> GenerateRequest:
    return GenerateRequest(
        np.asarray(prompt, np.int32),
        tuple(MemberRequest(index, f"{name}/{index}", index) for index in range(members)),
        SamplingParams(max_new_tokens=tokens, temperature=temperature, ignore_eos=ignore_eos),
        timeout_seconds=60.0,
    )


async def ask(client: FleetClient, wanted: GenerateRequest) -> list[Completion]:
    """In the order of the members; each must have succeeded."""
    found = [completion async for part in client.generate(wanted) for completion in part]
    assert all(completion.failure is None for completion in found), [completion.failure for completion in found]
    return sorted(found, key=lambda completion: completion.index)


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, prompt: list[int], response: np.ndarray, temperature: float) -> np.ndarray:
    """transformers' own, of the temperature-scaled distribution."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.from_numpy(response).long()[:, None])[:, 0].numpy()


def run(work):
    return asyncio.run(work)
