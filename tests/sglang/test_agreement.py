"""Real servers compute transformers' log-probs, and hold the trainer's weights after every mode of sync."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.engines.responses import UNTRAINED
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.broadcast import BroadcastCarrier
from asyncrl.weight_sync.channel import ReceiverChannel
from asyncrl.weight_sync.endpoints import UnknownState, UpdateEndpoints
from asyncrl.weight_sync.http_channel import DiskCarrier, HttpChannel
from tests.models import tiny_model
from tests.sglang.servers import RunningServer, ask, log_probs_of, request, serving
from tests.weight_sync.stand_in import StagedModel, TwoRankModel

PROMPT = [5, 6, 7, 8, 9]
FAMILIES = [(architecture, tie) for architecture in ("qwen2", "qwen3", "llama") for tie in (False, True)]
MODES = ("staged", "broadcast", "disk")
TIMEOUT = 20.0


def load(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


async def largest_error(server: RunningServer, model: torch.nn.Module, version: PolicyVersion, temperature: float = 1.0) -> float:
    """Of 4 responses of 24 tokens, which must all be of this version."""
    client = server.client(version.version, incarnation=version.incarnation)
    try:
        name = f"v{version}t{temperature}"
        found = await ask(client, request(PROMPT, members=4, tokens=24, temperature=temperature, name=name))
    finally:
        await client.close()
    assert {int(v) for completion in found for v in completion.versions} == {version.version}
    return max(
        float(np.abs(log_probs_of(model, PROMPT, completion.token_ids, temperature) - completion.log_probs).max())
        for completion in found
    )


@asynccontextmanager
async def line(mode: str, server: RunningServer, folder: Path):
    endpoints = UpdateEndpoints(server.url, token=None, timeout_seconds=TIMEOUT)
    checks = ReceiverChannel(server.receiver)
    match mode:
        case "staged":
            channel = checks
        case "disk":
            channel = HttpChannel(endpoints, DiskCarrier(endpoints, folder / "versions", server.model_folder), checks)
        case "broadcast":
            channel = HttpChannel(endpoints, BroadcastCarrier(endpoints, timeout_seconds=TIMEOUT), checks)
    try:
        yield channel
    finally:
        await channel.close()
        await endpoints.close()


@pytest.mark.parametrize("first", range(0, len(FAMILIES), 2), ids=lambda first: FAMILIES[first][0])
async def test_log_probs_and_weights_are_the_models(tmp_path, first):
    """A family, its head its own and tied, on two servers side by side; then every mode brings both of them versions from one
    rank and from two."""
    pairs = FAMILIES[first : first + 2]
    folders = [
        [tiny_model(tmp_path / f"{index}-{seed}", architecture=architecture, tie=tie, seed=seed) for seed in (0, 1, 2)]
        for index, (architecture, tie) in enumerate(pairs)
    ]
    async with AsyncExitStack() as stack:
        starts = (stack.enter_async_context(serving(folders[index][0], tmp_path, name=f"inference/{index}")) for index in (0, 1))
        servers = await asyncio.gather(*starts)
        models = [[load(folder) for folder in each] for each in folders]
        for server, (first_weights, *_) in zip(servers, models, strict=True):
            for temperature in (0.7, 1.0):
                assert await largest_error(server, first_weights, UNTRAINED, temperature) < 1e-4
        for number, (mode, seed) in enumerate(itertools.product(MODES, (1, 2)), start=1):
            make, version = (StagedModel, TwoRankModel)[seed - 1], PolicyVersion(1, number)
            await asyncio.gather(
                *(brought(mode, server, each[seed], make, version) for server, each in zip(servers, models, strict=True))
            )
            for server, each in zip(servers, models, strict=True):
                assert await largest_error(server, each[seed], version, 0.7) < 1e-4


async def brought(mode: str, server: RunningServer, model: torch.nn.Module, make, version: PolicyVersion) -> None:
    async with line(mode, server, server.model_folder) as channel:
        await bring(channel, make(weights(model)), version)


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_brings_the_trainers_weights_from_one_rank_and_two(shared, incarnation, tmp_path, mode):
    models, numbers = [load(tiny_model(tmp_path / str(seed), seed=seed)) for seed in (1, 2)], itertools.count()
    async with line(mode, shared, tmp_path) as channel:
        for kv_policy in ("keep", "recompute"):
            for model, make in zip(models, (StagedModel, TwoRankModel), strict=True):
                version = PolicyVersion(incarnation, next(numbers))
                await bring(channel, make(weights(model)), version, kv_policy=kv_policy)
                assert await largest_error(shared, model, version) < 1e-4
        assert (await channel.status(5))["committed"] == str(version)


async def test_an_update_that_the_server_refuses_half_way_leaves_it_to_be_brought_up_to_date(shared, incarnation, tmp_path):
    """What ran is ended, so that no token of it is taken for one of a version; the next whole version makes it right."""
    model = load(tiny_model(tmp_path / "model", seed=1))
    async with line("disk", shared, tmp_path) as channel:
        await bring(channel, StagedModel(weights(model)), PolicyVersion(incarnation, 0))
        client = shared.client(0, incarnation=incarnation)
        running = asyncio.create_task(completions_of(client, request(PROMPT, members=4, tokens=200, name="running")))
        await asyncio.sleep(0.3)
        load_folder, channel._endpoints.load_folder = channel._endpoints.load_folder, refused_load(channel._endpoints)
        with pytest.raises(UnknownState, match="refused update_weights_from_disk"):
            await bring(channel, StagedModel(weights(model)), PolicyVersion(incarnation, 1))
        assert [completion.finish_reason for completion in await running] == ["abort"] * 4
        await client.close()
        channel._endpoints.load_folder = load_folder
        await bring(channel, StagedModel(weights(model)), PolicyVersion(incarnation, 2))
        assert await largest_error(shared, model, PolicyVersion(incarnation, 2)) < 1e-4


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


async def bring(channel, staged, version: PolicyVersion, *, kv_policy: str = "keep") -> None:
    """In buckets smaller than some tensors, so that there are several."""
    try:
        outcome = await channel.update(staged.order(version, kv_policy=kv_policy, bucket_bytes=20_000))
    finally:
        staged.remove()
    assert outcome.verified


def refused_load(endpoints: UpdateEndpoints):
    """A folder that is not there."""
    real = endpoints.load_folder
    return lambda folder, version: real(f"{folder}-gone", version)


async def completions_of(client, wanted):
    return [completion async for part in client.generate(wanted) for completion in part]
