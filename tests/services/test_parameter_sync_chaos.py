"""Real servers that are damaged, held up and restarted at random while versions go out: in the end all hold the last one."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from asyncrl.services.parameter_sync.service import SyncSettings
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.services.weight_fleets import RealFace
from tests.waiting import until
from tests.weight_sync.stand_in import StandInTarget, a_model

SETTINGS = SyncSettings(heartbeat_seconds=0.02, silence_seconds=0.3, timeout_seconds=0.5, bucket_bytes=600)
VERSIONS = 30


class Chaos:
    """Does one harmful thing at a time, and remembers how to undo it."""

    def __init__(self, seed: int, face: RealFace, target: StandInTarget, publisher):
        self.random, self.face, self.publisher = random.Random(seed), face, publisher
        self.second = target

    async def harm(self) -> None:
        match self.random.choice(["nothing", "flip", "hold", "restart", "spoil"]):
            case "flip":
                memory = self.publisher._slots[self.random.randrange(2)].memory
                at = self.random.randrange(1500)
                memory[at] ^= 255
                await asyncio.sleep(0.01)
                memory[at] ^= 255
            case "hold":
                target = self.random.choice([self.face.target, self.second])
                target.gate.clear()
                asyncio.get_running_loop().call_later(self.random.choice([0.05, 0.8]), target.gate.set)
            case "restart":
                self.face.target.gate.set()
                await self.face.restart()
            case "spoil":
                self.second.spoil = True
                asyncio.get_running_loop().call_later(0.1, setattr, self.second, "spoil", False)


@pytest.mark.parametrize(("seed", "transport"), [(0, "shared_memory"), (1, "zeromq")])
async def test_whatever_happens_the_last_version_arrives_everywhere(seed, transport):
    face, second = RealFace(replace(SETTINGS, transport=transport)), StandInTarget(a_model())
    receiver = WeightReceiver(second)
    await face.start()
    await face.service.add_server("inference/1", "", receiver.start())
    publisher = face.publisher()
    await face.call(publisher.register)
    chaos = Chaos(seed, face, second, publisher)
    for version in range(VERSIONS):
        for tensor in face.model.values():
            tensor.add_(1.0)
        await face.call(publisher.stage, version, await face.call(publisher.acquire, version))
        await chaos.harm()
    await until(lambda: set(face.service.status()["servers"].values()) == {"READY"}, 40)
    assert face.service.status()["version"] == VERSIONS - 1
    assert face.target.holds(face.model)
    assert second.holds(face.model)
    figures = face.service.summary()["sync"]
    assert figures["count"] + figures["skipped"] == VERSIONS - 1
    await face.close()
    receiver.close()
