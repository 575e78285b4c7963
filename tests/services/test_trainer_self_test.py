"""The self-test before training: servers that agree let the run begin, those that do not end it by their name and the cause."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import RunError
from tests.services.trainer_world import TrainerWorld, scored, virtual


class Servers:
    """What two servers answer; `wrong` moves the log-probs of the second by so much, from call number `since` on."""

    def __init__(self, wrong: float = 0.0, since: int = 1):
        self.wrong, self.since, self.calls = wrong, since, 0

    async def probes(self):
        self.calls += 1
        moved = self.wrong if self.calls >= self.since else 0.0
        return {"inference/0": [scored(0)], "inference/1": [off(scored(1), moved)]}


def off(group, moved: float):
    return replace(group, log_probs=group.log_probs + np.float32(moved))


def judged_as_one(engine) -> None:
    """The trainer finds -1 for every token."""
    engine.judge = lambda batch, temperature, rounded: np.full(sum(len(g.log_probs) for g in batch.groups), -1.0, np.float32)


def test_servers_that_agree_are_compared_before_the_first_version_and_after_it(tmp_path):
    async def story():
        servers = Servers()
        world = TrainerWorld(tmp_path, training={"steps": 1}, probes=servers.probes)
        await world.arrive(scored(5), scored(7))
        await world.run()
        assert servers.calls == 2
        assert world.service.summary()["steps"] == 1
        figures = [values for origin, _, values in world.tracker.records if origin == "self_test"]
        assert [sorted(each) for each in figures] == [
            ["self_test/inference/0/log_prob_gap", "self_test/inference/1/log_prob_gap"]
        ] * 2

    virtual(story())


@pytest.mark.parametrize(("since", "when"), [(1, "as loaded"), (2, "after the first version")])
def test_a_server_that_differs_ends_the_run_before_anything_is_trained(tmp_path, since, when):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1}, probes=Servers(0.5, since).probes)
        judged_as_one(world.engine)
        await world.arrive(scored(5), scored(7))
        with pytest.raises(RunError, match=rf"self-test {when}: log-probs of inference/1 .* Likely cause: weights"):
            await world.run()
        assert world.engine.trained == 0
        assert [version for version, _ in world.publisher.staged] == [0] * (since - 1)

    virtual(story())


def test_versions_that_servers_never_confirm_end_the_run_by_that(tmp_path):
    async def story():
        world = TrainerWorld(tmp_path, training={"steps": 1}, probes=Servers().probes)
        world.publisher.wait_confirmed = lambda version, timeout: False
        with pytest.raises(RunError, match=r"version 0 was not confirmed .*sync\.timeout_seconds"):
            await world.run()

    virtual(story())
