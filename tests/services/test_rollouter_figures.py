"""The rollouter's totals are the run's: no kill takes anything from them that was said, or that left."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.services.kept_figures import KeptFigures
from asyncrl.services.rollouter.figures import Figures
from asyncrl.simulation.loop import VirtualClock, run_virtual
from tests.messages.samples import trajectory
from tests.services.rollouter_parts import Bench, make_config
from tests.services.test_rollouter_resume import in_virtual_time

ANSWER = trajectory(0, 0, num_tokens=3)
events = st.lists(st.sampled_from(["finish", "finish", "fail", "leave", "say", "kill"]), max_size=60)


class Life:
    """A process's figures and what it has not sent yet; `begin` recalls what the one before kept."""

    def __init__(self, folder):
        self.kept, self.figures, self.unsent = KeptFigures(Path(folder) / "rollouter.jsonl"), Figures(VirtualClock()), 0
        self.figures.begin(self.kept.recall())

    def keep(self):
        self.kept.keep(self.figures.kept())


@given(events=events)
def test_generated_is_at_least_what_left_and_no_total_goes_down(events):
    async def main():
        sent, said = 0, {"generated": 0, "failed": 0, "tokens": 0}
        with tempfile.TemporaryDirectory() as folder:
            life = Life(folder)
            for event in events:
                match event:
                    case "finish":
                        life.figures.take(ANSWER)
                        life.unsent += 1
                    case "fail":
                        life.figures.take(replace(ANSWER, failure="server lost", finish_reason="failed"))
                    case "leave":
                        life.keep()
                        sent, life.unsent = sent + life.unsent, 0
                    case "say":
                        life.keep()
                        before, said = said, life.figures.totals()
                        assert all(before[name] <= said[name] for name in said), (before, said)
                    case "kill":
                        life.kept.close()
                        life = Life(folder)
            assert life.figures.generated >= sent + life.unsent
            assert life.figures.tokens == 3 * life.figures.generated
            life.kept.close()

    run_virtual(main())


def test_a_rollouter_in_a_lost_ones_place_goes_on_counting(tmp_path):
    run_virtual(_lose_and_go_on(tmp_path))


async def _lose_and_go_on(run_dir):
    async with Bench(make_config(), kept=KeptFigures(run_dir / "rollouter.jsonl")) as bench:
        bench.fleet.show(0)
        await bench.settle()
        before = bench.rollouter.summary()
        assert before["trajectories"]["generated"] == len(bench.sender.sent) > 0
        await bench.lose()
        await bench.restart()
        assert bench.rollouter.summary()["trajectories"] == before["trajectories"]
        await bench.take_step()
        await bench.settle()
        after = bench.rollouter.summary()
        assert after["trajectories"]["generated"] == len(bench.sender.sent) > before["trajectories"]["generated"]
        assert after["tokens"]["generated"] == sum(len(sent.response_tokens) for sent in bench.sender.sent)
        assert bench.tracker.last("rollouter")["rollouter/trajectories_per_second"] == 0.0


@in_virtual_time
async def test_idle_is_a_share_of_the_time_of_all_lives():
    figures = Figures(VirtualClock())
    figures.begin({"idle_seconds": {"bound": 5.0}, "seconds": 20.0})
    figures.set_active(1)
    await asyncio.sleep(30.0)
    assert figures.idle_share() == pytest.approx(5.0 / 50.0)
    assert figures.kept()["seconds"] == pytest.approx(50.0)
