"""A receiver over a stand-in target, a staged model, and the line between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from asyncrl.weight_sync.channel import ReceiverChannel
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.weight_sync.stand_in import StagedModel, StandInTarget, a_model


@pytest.fixture
def staged() -> Iterator[StagedModel]:
    model = StagedModel(a_model(seed=1))
    yield model
    model.remove()


@pytest.fixture
def target() -> StandInTarget:
    return StandInTarget(a_model())


@pytest.fixture
def address(target: StandInTarget) -> Iterator[str]:
    receiver = WeightReceiver(target)
    yield receiver.start()
    receiver.close()


@pytest.fixture
async def channel(address: str) -> AsyncIterator[ReceiverChannel]:
    channel = ReceiverChannel(address)
    yield channel
    await channel.close()
