"""Fifty versions reach a real server while it decodes: no request is aborted or starts over, every token is of its version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from asyncrl.engines.client import FleetClient
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.channel import ReceiverChannel
from tests.sglang.servers import RunningServer, ask, log_probs_of, request
from tests.weight_sync.stand_in import StagedModel

UPDATES, STREAMS, TOKENS = 50, 16, 200
PROMPT = list(range(3, 15))


class Versions:
    """Version n of a model: its weights, moved a little n times. Version 0 is the folder's."""

    def __init__(self, folder: Path, incarnation: int):
        self.incarnation = incarnation
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        generator = torch.Generator().manual_seed(7)
        self.first = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.steps = {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in self.first.items()}

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return {name: value + number * self.steps[name] for name, value in self.first.items()}

    def at(self, number: int) -> torch.nn.Module:
        weights = self.weights(number)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        return self.model


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
async def test_fifty_updates_during_long_streams(shared, incarnation, kv_policy):
    versions, channel = Versions(shared.model_folder, incarnation), ReceiverChannel(shared.receiver)
    await bring(channel, versions, 0, kv_policy)
    client = shared.client(0, incarnation=incarnation)
    streams, found = [ask_long(client, 0)], []
    try:
        await asyncio.sleep(0.3)
        for number in range(1, UPDATES + 1):
            await bring(channel, versions, number, kv_policy)
            client.update(shared.view(number, incarnation=incarnation, seq=number + 1))
            if streams[-1].done():  # the machine was slow: more of them, for the versions that are left
                streams.append(ask_long(client, number))
                await asyncio.sleep(0.1)
        for each in streams:
            found += await each
        await judge(found, versions, kv_policy)
        await prefixes_stay_apart(shared, versions, channel)
    finally:
        await client.close()
        await channel.close()


async def bring(channel: ReceiverChannel, versions: Versions, number: int, kv_policy: str) -> None:
    staged = StagedModel(versions.weights(number), bucket_bytes=65536)
    try:
        outcome = await channel.update(staged.order(PolicyVersion(versions.incarnation, number), kv_policy=kv_policy))
    finally:
        staged.remove()
    assert outcome.verified


def ask_long(client: FleetClient, number: int) -> asyncio.Task:
    return asyncio.create_task(ask(client, request(PROMPT, members=STREAMS, tokens=TOKENS, name=f"long{number}")))


async def judge(found, versions: Versions, kv_policy: str) -> None:
    assert {len(completion.token_ids) for completion in found} == {TOKENS}, "nothing was aborted, nothing started over"
    assert all(np.all(np.diff(completion.versions) >= 0) for completion in found), "versions only grow within a response"
    seen = sorted({int(version) for completion in found for version in completion.versions})
    assert len(seen) >= 3, "some responses were under way while versions changed"
    if kv_policy == "keep":  # log-probs then match no single version: later tokens see keys and values of earlier ones
        return
    for number in seen:
        model = versions.at(number)
        for completion in found:
            of_version = completion.versions == number
            if of_version.any():
                expected = log_probs_of(model, PROMPT, completion.token_ids, 1.0)
                assert np.abs(expected - completion.log_probs)[of_version].max() < 1e-4


async def prefixes_stay_apart(server: RunningServer, versions: Versions, channel: ReceiverChannel) -> None:
    """Within a version a prompt's prefix is found in the cache; under the next it is not."""
    prompt = list(range(3, 43))

    async def cached(rid: str) -> int:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
            "rid": rid,
            "extra_key": "same",
        }
        async with aiohttp.ClientSession() as session, session.post(f"{server.url}/generate", json=body) as answer:
            return int((await answer.json())["meta_info"]["cached_tokens"])

    assert await cached("first") == 0
    assert await cached("second") >= len(prompt) - 2
    await bring(channel, versions, UPDATES + 1, "keep")
    assert await cached("after the update") == 0
    assert await cached("once more") >= len(prompt) - 2
