"""The supervisor over rows that are little servers in this process: what it calls a failure, and what it writes of one."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.load import load_mapping
from asyncrl.config.schema import Config
from asyncrl.errors import MalformedFrame
from asyncrl.ledger.states import Attempts
from asyncrl.ledger.store import FILE_NAME, LedgerWriter
from asyncrl.messages import GroupId
from asyncrl.protocols import Dispatch, End, PromptCursor, StepRecord
from asyncrl.services.supervisor import Life, Resume, Row, RowFailed, Supervisor
from asyncrl.services.supervisor.hearing import Hearing
from asyncrl.services.supervisor.runtime import with_the_fleets_word
from asyncrl.transport.rpc import RpcServer

SILENT_QUESTIONS = 8


class Process:
    """A row: answers `summary` and `stop` unless it hangs."""

    def __init__(self, row: Row, summary: Mapping[str, Any]):
        self.row, self.summary = row, summary
        self.stopped, self._answers = asyncio.Event(), asyncio.Event()
        self._answers.set()
        self.server = RpcServer({"summary": self.answer, "stop": self.stop, "status": dict})

    async def answer(self) -> Mapping[str, Any]:
        await self._answers.wait()
        return self.summary

    async def stop(self, seconds: float | None = None) -> None:
        await self._answers.wait()
        self.stopped.set()

    def hang(self, hangs: bool) -> None:
        (self._answers.clear if hangs else self._answers.set)()


class FakeRuntime:
    """Rows of one process each. `at_running(name, process)` is called when a row begins to run, and may be a coroutine."""

    def __init__(self, summaries: Mapping[str, Mapping[str, Any]], at_running=None):
        self.summaries, self.at_running = summaries, at_running
        self.processes: dict[str, Process] = {}
        self.ended: list[str] = []
        self.lives: list[tuple[str, Life]] = []
        self.closed = False

    async def open(self) -> None: ...

    async def prepare_model(self) -> None: ...

    def place(self, row: Row, life: Life) -> None:
        self.lives.append((row.name, life))
        self.processes[row.name] = Process(row, self.summaries.get(row.name, {}))

    async def start(self, row: Row) -> dict[str, str]:
        return {"rpc": await self.processes[row.name].server.start(), "pid": "1", "host": "here"}

    async def run(self, row: Row, book) -> Mapping[str, Any]:
        process = self.processes[row.name]
        if self.at_running is not None:
            work = asyncio.ensure_future(self.at_running(row.name, process))
            stopped = asyncio.ensure_future(process.stopped.wait())
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if work.done():
                work.result()
            else:
                work.cancel()
        else:
            await process.stopped.wait()
        return process.summary

    async def end(self, row: Row) -> None:
        self.ended.append(row.name)
        await self.processes[row.name].server.close()

    async def close(self) -> None:
        self.closed = True
        for process in self.processes.values():
            await process.server.close()


class FakeMetrics:
    mlflow_run_id = None

    def __init__(self, broken: bool = False):
        self.broken, self.logged = broken, []

    def log(self, axis, step, metrics) -> None:
        self.logged.append((axis, step, metrics))

    def state(self, text: str) -> None:
        if self.broken:
            raise BrokenPipeError

    async def close(self, status, summary, seconds=None) -> None:
        self.closed_within = seconds
        if self.broken:
            raise BrokenPipeError


@pytest.fixture
def config() -> Config:
    values = {
        "model": {"path": "builtin/arithmetic"},
        "data": {"train": "builtin/arithmetic"},
        "reward": {"functions": [{"function": "exact_match"}]},
        "training": {"steps": 10, "groups_per_step": 4},
        "rollout": {"max_response_tokens": 8, "max_prompt_tokens": 16},
        "cluster": {"stop_grace_seconds": 0.5, "max_restarts": 0, "silence_seconds": 0.06 * SILENT_QUESTIONS},
    }
    return load_mapping(values).config


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.services.supervisor.lives.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("asyncrl.services.supervisor.lives.CALL_SECONDS", 0.1)
    monkeypatch.setattr(Hearing.__init__, "__kwdefaults__", {"answer_seconds": 0.05, "pause_seconds": 0.01})


def supervisor_of(config: Config, run_dir: Path, runtime: FakeRuntime, metrics: FakeMetrics | None = None) -> Supervisor:
    run_dir.mkdir(exist_ok=True)
    return Supervisor(config, run_dir, "id", runtime, metrics or FakeMetrics(), SystemClock())


async def finishing(name: str, process: Process) -> None:
    """The rows that decide the end return soon, the others wait to be stopped."""
    if not process.row.decides_the_end:
        await process.stopped.wait()
    await asyncio.sleep(0.1)


async def test_a_run_is_finished_when_trainer_and_rollouter_are(config, tmp_path):
    runtime = FakeRuntime({"trainer/0": {"steps": 10}}, finishing)
    summary = await supervisor_of(config, tmp_path, runtime).supervise()
    assert (summary["status"], summary["steps"], runtime.ended, runtime.closed) == ("finished", 10, [], True)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 10


def test_a_server_that_takes_no_traffic_is_shown_so_and_why():
    serving = [{"name": f"inference/{index}", "state": "serving", "version": 3} for index in range(3)]
    fleet = {"inference/0": "READY", "inference/1": "STALE", "inference/2": "UPDATING"}
    sync = {"name": "parameter_sync", "state": "ready", "servers": fleet, "reasons": {"inference/1": "its connection broke"}}
    shown = with_the_fleets_word([sync, *serving])
    assert shown == [sync, serving[0], {**serving[1], "state": "stale", "reason": "its connection broke"}, serving[2]]
    assert with_the_fleets_word(serving) == serving


async def test_what_is_not_up_by_the_deadline_is_named_and_ends_the_run(config, tmp_path):
    class Stuck(FakeRuntime):
        async def start(self, row):
            if row.name in ("reward/0", "inference/0"):
                await asyncio.Event().wait()
            return await super().start(row)

    soon = config.model_copy(update={"cluster": config.cluster.model_copy(update={"start_timeout_seconds": 0.5})})
    runtime = Stuck({})
    summary = await supervisor_of(soon, tmp_path / "run", runtime).supervise()
    assert (summary["status"], summary["exit_code"], runtime.closed) == ("failed", 1, True)
    assert "(cluster.start_timeout_seconds): inference/0, reward/0; read their files under logs/" in summary["error"]


@pytest.mark.parametrize(
    "name", ["rollouter", "message_queue", "parameter_sync", "reward", "reward/0", "trainer/0", "inference/0"]
)
async def test_a_row_that_hangs_ends_the_run_by_its_name(config, tmp_path, name):
    async def hang(row: str, process: Process) -> None:
        process.hang(row == name)
        await process.stopped.wait()

    runtime = FakeRuntime({}, hang)
    summary = await asyncio.wait_for(supervisor_of(config, tmp_path, runtime).supervise(), 30)
    assert summary["status"] == "failed"
    assert f"service {name} died: its process has not answered for" in summary["error"]
    assert (runtime.ended, runtime.closed) == ([name], True)


async def test_a_row_that_is_silent_for_a_while_ends_nothing(config, tmp_path):
    async def pause(row: str, process: Process) -> None:
        process.hang(row == "inference/0")
        await asyncio.sleep(0.06 * SILENT_QUESTIONS / 2)
        process.hang(False)
        await finishing(row, process)

    summary = await supervisor_of(config, tmp_path, FakeRuntime({}, pause)).supervise()
    assert summary["status"] == "finished"


async def test_a_row_that_waited_in_vain_for_one_that_hangs_is_not_the_cause(config, tmp_path):
    async def wait_in_vain(row: str, process: Process) -> None:
        process.hang(row == "message_queue")
        if row == "trainer/0":
            await asyncio.sleep(0.06 * 4)
            raise RowFailed(process.row, "DeadlineExceeded: ledger.finish_step was not answered", lost=False)
        await process.stopped.wait()

    summary = await supervisor_of(config, tmp_path, FakeRuntime({}, wait_in_vain)).supervise()
    assert "service message_queue died: its process has not answered" in summary["error"]
    assert "trainer/0 waited for it in vain" in summary["error"]


async def test_a_lost_row_leaves_what_it_said_last(config, tmp_path):
    async def die(row: str, process: Process) -> None:
        await asyncio.sleep(0.2)
        if row == "rollouter":
            raise RowFailed(process.row, "its process ended unexpectedly", lost=True)
        await process.stopped.wait()

    told = {"rollouter": {"eval": {"first": 0.25}, "trajectories": {"generated": 96}}, "trainer/0": {"steps": 3}}
    summary = await supervisor_of(config, tmp_path, FakeRuntime(told, die)).supervise()
    assert (summary["eval"]["first"], summary["trajectories"]["generated"], summary["steps"]) == (0.25, 96, 3)


async def test_when_the_queue_is_lost_the_ledgers_file_is_the_word_on_samples_and_steps(config, tmp_path):
    async def die(row: str, process: Process) -> None:
        await asyncio.sleep(0.1)
        if row == "message_queue":
            write_ledger(tmp_path)
            raise RowFailed(process.row, "its process ended unexpectedly", lost=True)
        await process.stopped.wait()

    told = {"message_queue": {"samples": {"dispatched": 1}}, "trainer/0": {"steps": 0}}
    summary = await supervisor_of(config, tmp_path, FakeRuntime(told, die)).supervise()
    assert (summary["samples"]["dispatched"], summary["samples"]["trained"], summary["samples"]["in_flight"]) == (2, 1, 1)
    assert summary["steps"] == 1


def write_ledger(run_dir: Path) -> None:
    """Two groups, one of them trained in step 1."""
    writer, attempts = LedgerWriter(run_dir / FILE_NAME), Attempts()
    first, second = GroupId(0, 0, 0), GroupId(0, 1, 0)
    cursor = PromptCursor(epoch=0, position=2, num_rows=2, seed=0, shuffle=False)
    writer.append(attempts.dispatch([Dispatch(first, 0), Dispatch(second, 0)], cursor))
    writer.append(attempts.queue([first]))
    writer.append(attempts.finish_step(StepRecord(1, 0, (End(first, "trained"),))))
    writer.close()


async def test_a_run_directory_that_went_away_fails_the_run_in_words(config, tmp_path):
    async def lose_the_folder(row: str, process: Process) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        await finishing(row, process)

    runtime = FakeRuntime({}, lose_the_folder)
    summary = await supervisor_of(config, tmp_path / "run", runtime).supervise()
    assert summary["status"] == "failed"
    assert "summary.json cannot be written (No such file or directory)" in summary["error"]
    assert runtime.closed


async def test_a_stop_that_comes_with_its_time_leaves_the_metrics_no_more_than_that(config, tmp_path):
    metrics, runtime = FakeMetrics(), FakeRuntime({})
    supervisor = supervisor_of(config, tmp_path, runtime, metrics)
    asyncio.get_running_loop().call_later(0.3, supervisor.request_stop, 5.0)
    summary = await supervisor.supervise()
    assert summary["status"] == "interrupted"
    assert 1.0 <= metrics.closed_within < 5.0


async def test_a_terminal_that_is_gone_ends_nothing(config, tmp_path):
    runtime = FakeRuntime({}, finishing)
    summary = await supervisor_of(config, tmp_path, runtime, FakeMetrics(broken=True)).supervise()
    assert (summary["status"], runtime.closed) == ("finished", True)


async def test_a_runtime_that_cannot_be_closed_leaves_a_summary_all_the_same(config, tmp_path):
    runtime = FakeRuntime({"trainer/0": {"steps": 10}}, finishing)
    close = runtime.close

    async def fail() -> None:
        await close()
        raise RuntimeError("the cluster is gone")

    runtime.close = fail  # type: ignore[method-assign]
    summary = await supervisor_of(config, tmp_path, runtime).supervise()
    assert summary["status"] == "finished"
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 10


# ── processes that are started again ──────────────────────────────────────────────────────────────────────────────────────


def restarting(config: Config, **sections: Any) -> Config:
    """The same with restarts."""
    values = {**config.to_mapping(), **sections}
    return load_mapping({**values, "cluster": {**values["cluster"], "max_restarts": 2}}).config


class Mortal:
    """`at_running`: rows die once when their turn comes; the rest finishes a moment after the last of them."""

    def __init__(self, *deaths: str):
        self.deaths = list(deaths)
        self.births: list[str] = []

    async def __call__(self, name: str, process: Process) -> None:
        self.births.append(name)
        if self.deaths and self.deaths[0] == name:
            await asyncio.sleep(0.05)
            self.deaths.pop(0)
            raise RowFailed(process.row, "its process ended unexpectedly", lost=True)
        while self.deaths:
            await asyncio.sleep(0.01)
            if self.deaths and self.deaths[0] == name:
                self.deaths.pop(0)
                raise RowFailed(process.row, "its process ended unexpectedly", lost=True)
        await asyncio.sleep(1.0)
        await finishing(name, process)


def lives_after_the_first(runtime: FakeRuntime) -> dict[str, Life]:
    return {name: life for name, life in runtime.lives if not life.first}


@pytest.mark.parametrize("name", ["rollouter", "reward", "reward/0", "inference/0", "message_queue"])
async def test_a_lost_row_is_started_again_where_it_was(config, tmp_path, name):
    runtime = FakeRuntime({"trainer/0": {"steps": 10}}, Mortal(name))
    summary = await supervisor_of(restarting(config, queue={"durability": "process"}), tmp_path, runtime).supervise()
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    again = lives_after_the_first(runtime)
    assert again.keys() == {name}
    assert again[name].earlier["rpc"].startswith("tcp://127.0.0.1:")
    assert runtime.ended == [name]


async def test_rows_lost_one_after_the_other_are_all_started_again(config, tmp_path):
    mortal = Mortal("reward", "inference/0", "rollouter", "reward")
    summary = await supervisor_of(restarting(config), tmp_path, FakeRuntime({}, mortal)).supervise()
    assert summary["status"] == "finished"
    born = {name: mortal.births.count(name) for name in ("reward", "inference/0", "rollouter")}
    assert born == {"reward": 3, "inference/0": 2, "rollouter": 2}


async def test_a_lost_rank_sets_everybody_back_as_a_new_incarnation(config, tmp_path):
    runtime = FakeRuntime({}, Mortal("trainer/0"))
    summary = await supervisor_of(restarting(config, checkpoint={"every": 5}), tmp_path, runtime).supervise()
    assert summary["status"] == "finished"
    again = lives_after_the_first(runtime)
    assert list(again) == ["message_queue", "rollouter", "reward", "trainer/0"]
    assert {(life.incarnation, life.set_back_to, life.checkpoint) for life in again.values()} == {(2, 0, None)}
    assert json.loads((tmp_path / "run.json").read_text())["incarnation"] == 2


async def test_a_checkpoint_that_cannot_be_read_when_the_trainer_is_lost_ends_the_run_with_that_sentence(config, tmp_path):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000005" / "state.json").write_text('{"format": 9}')
    runtime = FakeRuntime({}, Mortal("trainer/0"))
    summary = await supervisor_of(restarting(config, checkpoint={"every": 5}), tmp_path, runtime).supervise()
    assert summary["status"] == "failed"
    assert summary["error"].startswith("this build reads checkpoints of format 1, and ")


async def test_processes_are_told_when_the_launch_began_and_what_those_before_it_took(config, tmp_path):
    resume = Resume(3, 0, None, launches=3, wall_s=100.0)
    runtime, began = FakeRuntime({}, Mortal("trainer/0")), time.time()
    settings = restarting(config, checkpoint={"every": 5})
    await Supervisor(settings, tmp_path, "id", runtime, FakeMetrics(), SystemClock(), resume=resume).supervise()
    assert len({life.launched for _, life in runtime.lives}) == 1
    assert began <= runtime.lives[0][1].launched <= time.time()
    assert {life.earlier_s for _, life in runtime.lives} == {100.0}


async def test_the_first_step_is_the_launchs_whichever_trainer_made_it(config, tmp_path):
    runtime = FakeRuntime({"trainer/0": {"steps": 10, "first_step_time": time.time() + 500.0}}, Mortal("trainer/0"))
    supervisor = supervisor_of(restarting(config, checkpoint={"every": 5}), tmp_path, runtime)
    supervisor.track([["rollouter", 1, {"idle/rollouter": 0.0}], ["trainer", 1, {"step": 1.0}], ["trainer", 2, {"step": 2.0}]])
    summary = await supervisor.supervise()
    assert len(lives_after_the_first(runtime)) > 0
    assert 0.0 <= summary["first_step_s"] < 100.0
    assert "launches" not in summary


async def test_a_resumed_run_says_its_launches_and_its_time_over_all_of_them(config, tmp_path):
    resume = Resume(3, 40, None, launches=3, wall_s=100.0)
    runtime = FakeRuntime({"trainer/0": {"steps": 50, "first_step_time": time.time() + 7.0}}, finishing)
    summary = await Supervisor(config, tmp_path, "id", runtime, FakeMetrics(), SystemClock(), resume=resume).supervise()
    assert (summary["launches"], summary["total_wall_s"]) == (3, pytest.approx(100.0 + summary["wall_s"], abs=0.02))
    assert summary["first_step_s"] == pytest.approx(7.0, abs=2.0)


async def test_a_row_that_keeps_dying_ends_the_run_with_the_reason(config, tmp_path):
    summary = await supervisor_of(restarting(config), tmp_path, FakeRuntime({}, Mortal(*["reward/0"] * 9))).supervise()
    assert summary["status"] == "failed"
    assert "service reward/0 died" in summary["error"]
    assert "lost 3 times without a new step" in summary["error"]


async def test_a_service_that_raises_is_not_started_again(config, tmp_path):
    async def raise_once(row: str, process: Process) -> None:
        if row == "reward":
            raise RowFailed(process.row, "RunError: no reward worker for 60 s", lost=False)
        await finishing(row, process)

    runtime = FakeRuntime({}, raise_once)
    summary = await supervisor_of(restarting(config), tmp_path, runtime).supervise()
    assert summary["status"] == "failed"
    assert "no reward worker" in summary["error"]
    assert not lives_after_the_first(runtime)


@pytest.mark.parametrize(
    "record", [["x", 1, {"a": "b"}], ["x", 1, {1: 2.0}], ["x", "1", {"a": 1.0}], ["x", 1], 7, ["x", 1, {"a": None}], ["x", 1, []]]
)
def test_metrics_that_are_none_are_refused_whole(config, tmp_path, record):
    metrics = FakeMetrics()
    supervisor = supervisor_of(config, tmp_path, FakeRuntime({}), metrics)
    with pytest.raises(MalformedFrame, match="found"):
        supervisor.track([["trainer", 1, {"step": 1.0}], record])
    assert metrics.logged == []
    supervisor.track([["trainer", 1, {"step": 1.0, "lr": float("nan")}]])
    assert len(metrics.logged) == 1


async def test_what_the_user_gave_wrong_is_said_alone_with_exit_code_2(config, tmp_path):
    async def refuse(row: str, process: Process) -> None:
        if row == "rollouter":
            raise RowFailed(process.row, "row 3 of data.train has 900 tokens", lost=False, mistake=True)
        await finishing(row, process)

    summary = await supervisor_of(config, tmp_path, FakeRuntime({}, refuse)).supervise()
    assert (summary["status"], summary["exit_code"]) == ("failed", 2)
    assert summary["error"] == "rollouter: row 3 of data.train has 900 tokens"


class Mute(Mortal):
    """A trainer that does not answer these calls, and is lost a second after the other."""

    def __init__(self, *deaths: str, calls: tuple[str, ...]):
        super().__init__(*deaths)
        self.calls = calls

    async def __call__(self, name: str, process: Process) -> None:
        if name != "trainer/0" or self.deaths[-1:] != [name]:
            await super().__call__(name, process)
            return
        self.births.append(name)
        process.server.add(dict.fromkeys(self.calls, asyncio.Event().wait))
        while self.deaths != [name]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # the other loss is being mended by then
        self.deaths.clear()
        raise RowFailed(process.row, "its process ended unexpectedly", lost=True)


async def test_a_rank_that_is_lost_while_parameter_sync_comes_back_is_noticed_at_once(config, tmp_path):
    mute = Mute("parameter_sync", "trainer/0", calls=("reannounce",))
    work = supervisor_of(restarting(config, checkpoint={"every": 5}), tmp_path, FakeRuntime({}, mute)).supervise()
    summary = await asyncio.wait_for(work, 30)
    assert summary["status"] == "finished"
    assert mute.births.count("trainer/0") == 2


async def test_a_trainer_that_is_lost_while_it_is_asked_what_it_holds_takes_everybody_back(config, tmp_path):
    mute = Mute("message_queue", "trainer/0", calls=("held",))
    runtime = FakeRuntime({}, mute)
    work = supervisor_of(restarting(config, checkpoint={"every": 5}), tmp_path, runtime).supervise()
    summary = await asyncio.wait_for(work, 25)
    assert summary["status"] == "finished"
    assert mute.births.count("trainer/0") == 2
    assert lives_after_the_first(runtime)["message_queue"].set_back_to == 0
