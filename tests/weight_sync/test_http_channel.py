"""Updates through a server's own endpoints: the order of calls, what a refusal leaves behind, whether it is the same server."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.errors import DeadlineExceeded, DigestMismatch
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.weight_sync.channel import Progress, ReceiverChannel
from asyncrl.weight_sync.endpoints import UnknownState, UpdateEndpoints
from asyncrl.weight_sync.http_channel import DiskCarrier, HttpChannel
from asyncrl.weight_sync.receiver import WeightReceiver
from tests.weight_sync.stand_in import StagedModel, StandInTarget, a_model

FIRST, SECOND = PolicyVersion(1, 1), PolicyVersion(1, 2)


class Server:
    """Notes what is asked of it; loads folders into the target that its receiver looks at. `refuses`: a path that answers 400."""

    def __init__(self, tensors):
        self.target = StandInTarget(tensors)
        self.asked: list[tuple[str, dict]] = []
        self.refuses, self.version = "", "default"

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path.strip("/")
        if path == "model_info":
            return web.json_response({"weight_version": self.version})
        body = json.loads(await request.read())
        self.asked.append((path, body))
        if path == self.refuses:
            return web.json_response({"success": False, "message": "no"}, status=400)
        if path == "update_weights_from_disk":
            for name, tensor in load_file(f"{body['model_path']}/model.safetensors").items():
                self.target.live()[name].copy_(tensor)
            self.version = body["weight_version"]
        return web.json_response({"success": True})

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
async def server(tmp_path):
    serving = Server(a_model())
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serving.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    serving.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    serving.receiver = WeightReceiver(serving.target)
    serving.address = serving.receiver.start()
    yield serving
    serving.receiver.close()
    await runner.cleanup()


@pytest.fixture
async def channel(server, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    endpoints = UpdateEndpoints(server.url, token=None, timeout_seconds=5)
    made = HttpChannel(
        endpoints, DiskCarrier(endpoints, tmp_path / "versions", tmp_path / "model"), ReceiverChannel(server.address)
    )
    yield made
    await made.close()


@pytest.fixture
def staged():
    model = StagedModel(a_model(seed=1))
    yield model
    model.remove()


@pytest.mark.parametrize(("kv_policy", "mode"), [("keep", "in_place"), ("recompute", "retract")])
async def test_one_pause_goes_round_the_whole_version_and_what_is_live_is_compared(server, channel, staged, kv_policy, mode):
    outcome = await channel.update(staged.order(FIRST, kv_policy=kv_policy))
    assert server.paths == [
        "pause_generation", "begin_weight_update", "update_weights_from_disk", "end_weight_update", "continue_generation",
    ]  # fmt: skip
    assert server.asked[0][1] == {"mode": mode}
    assert server.asked[2][1]["flush_cache"] is False
    assert outcome.verified
    assert server.target.holds(a_model(seed=1))
    assert (await channel.status(5))["committed"] == "1.1"


@pytest.mark.parametrize(
    "refuses", ["begin_weight_update", "update_weights_from_disk", "end_weight_update", "continue_generation"]
)
async def test_a_refusal_in_the_middle_ends_what_runs_and_the_next_version_comes_whole(server, channel, staged, refuses):
    server.refuses = refuses
    with pytest.raises(UnknownState, match=f"refused {refuses}"):
        await channel.update(staged.order(FIRST))
    after = server.paths[server.paths.index(refuses) + 1 :]
    assert after == ["abort_request", "end_weight_update", "continue_generation"]
    server.refuses = ""
    assert (await channel.update(staged.order(SECOND))).verified


async def test_weights_that_are_not_those_published_are_found(server, channel, staged):
    heard, write = [], channel._carrier._write
    channel._carrier._write = lambda path, tensors: write(path, {**tensors, "scale": tensors["scale"] + 1})
    with pytest.raises(DigestMismatch, match="scale"):
        await channel.update(staged.order(FIRST), Progress(unverified=heard.append))
    assert heard == ["differs"]


async def test_bytes_that_lie_wrong_in_a_slot_never_reach_the_server(server, channel, staged):
    refused = []
    staged.flip()
    with pytest.raises(DigestMismatch, match="lay wrong in their slots"):
        await channel.update(staged.order(FIRST), Progress(refused=refused.append))
    assert refused == [1] * 4
    assert server.paths == []


async def test_a_server_that_says_another_version_than_it_was_brought_is_another_process(server, channel, staged):
    await channel.update(staged.order(FIRST))
    session = (await channel.status(5))["session"]
    assert (await channel.status(5))["session"] == session
    server.version = "default"
    status = await channel.status(5)
    assert (status["session"] != session, status["committed"]) == (True, None)


async def test_only_the_version_on_the_disk_and_the_one_before_take_room(channel, staged, tmp_path):
    for number in range(1, 6):
        await channel.update(staged.order(PolicyVersion(1, number)))
    left = sorted(path.name for path in (tmp_path / "versions").iterdir())
    assert left == ["version_1.4", "version_1.5"]
    assert sorted(path.name for path in (tmp_path / "versions" / "version_1.5").iterdir()) == ["config.json", "model.safetensors"]


async def test_a_server_that_is_gone_is_said_to_be():
    endpoints = UpdateEndpoints("http://127.0.0.1:9", token=None, timeout_seconds=2)
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await endpoints.model_info(1)
    with pytest.raises(UnknownState, match="was lost during pause_generation"):
        await endpoints.pause("in_place")
    await endpoints.close()
