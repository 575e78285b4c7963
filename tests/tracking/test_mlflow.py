"""MLflow never slows or ends a run, and nothing that was logged is lost."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.errors import UserError
from asyncrl.tracking import facts, mlflow_tracker
from asyncrl.tracking.facts import flattened, name_of, tags
from asyncrl.tracking.mlflow_tracker import MlflowTracker
from asyncrl.tracking.replay import main as replay_main
from asyncrl.tracking.replay import replay
from asyncrl.tracking.spool import Record, RunFacts, Spool, read_spool
from asyncrl.tracking.store import MlflowStore, absolute_uri
from tests.tracking.stores import FakeStore

FACTS = RunFacts("fake://", "tests", "run", {"training.steps": "3"}, {"version.asyncrl": "0"}, 0)


@pytest.fixture
def store():
    return FakeStore()


def tracker_of(store, run_dir, **options):
    return MlflowTracker(lambda: FACTS, run_dir, open_store=store, **options)


def test_a_run_is_told_with_its_parameters_artifacts_and_end(store, tmp_path):
    for name in ("config.yaml", "summary.json"):
        (tmp_path / name).write_text("{}")
    tracker = tracker_of(store, tmp_path, artifacts_at_start=[tmp_path / "config.yaml"])
    tracker.log("trainer", 1, {"loss": 0.5})
    assert tracker.finish("FAILED", [tmp_path / "summary.json", tmp_path / "missing.json"])
    assert store.runs == [FACTS]
    assert store.given_params == FACTS.params
    assert store.artifacts == ["config.yaml", "summary.json"]
    assert store.ended == [(tracker.run_id, "FAILED")]
    assert not (tmp_path / "mlflow_spool.jsonl").exists()


def test_a_run_that_goes_on_keeps_its_id_and_its_parameters(store, tmp_path):
    store.known = {"earlier"}
    tracker = tracker_of(store, tmp_path, run_id="earlier")
    tracker.log("trainer", 4, {"loss": 0.5})
    assert tracker.finish("FINISHED")
    assert (tracker.run_id, store.runs, store.given_params) == ("earlier", [], {})
    assert store.ended == [("earlier", "FINISHED")]


def test_a_run_that_the_store_has_no_more_is_made_anew(store, tmp_path, caplog):
    tracker = tracker_of(store, tmp_path, run_id="gone")
    assert tracker.finish("FINISHED")
    assert (store.reopened, tracker.run_id, store.given_params) == (["gone"], "run1", FACTS.params)
    assert "no run gone any more" in caplog.text


def test_a_name_that_two_axes_log_is_two_metrics(store, tmp_path):
    tracker = tracker_of(store, tmp_path)
    tracker.log("trainer", 1, {"tokens": 1.0})
    tracker.log("rollouter", 7, {"tokens": 2.0})
    tracker.log("trainer", 2, {"tokens": 3.0})
    tracker.finish("FINISHED")
    assert [(r.name, r.step) for r in store.records] == [("tokens", 1), ("rollouter/tokens", 7), ("tokens", 2)]


def test_a_store_that_comes_back_gets_everything(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_tracker, "FIRST_PAUSE_SECONDS", 0.01)
    store.down = True
    tracker = tracker_of(store, tmp_path)
    tracker.log("trainer", 1, {"loss": 0.5})
    while store.attempts < 3:
        time.sleep(0.005)
    store.down = False
    tracker.log("trainer", 2, {"loss": 0.25})
    assert tracker.finish("FINISHED")
    assert [(r.step, r.value) for r in store.records] == [(1, 0.5), (2, 0.25)]


def test_a_store_that_is_down_costs_little_time_and_is_told_later(store, tmp_path, caplog):
    (tmp_path / "summary.json").write_text("{}")
    store.down = True
    tracker = tracker_of(store, tmp_path)
    for step in range(5000):
        tracker.log("trainer", step, {"loss": float(step)})
    began = time.monotonic()
    assert not tracker.finish("FINISHED", [tmp_path / "summary.json"])
    assert time.monotonic() - began < 5
    assert "python -m asyncrl.tracking.replay" in caplog.text

    store.down = False
    run_id = replay(tmp_path, open_store=store)
    assert [r.step for r in store.records] == list(range(5000))
    assert (store.ended, store.artifacts) == ([(run_id, "FINISHED")], ["summary.json"])
    with pytest.raises(UserError, match="everything that was logged has reached MLflow"):
        replay(tmp_path, open_store=store)


@pytest.mark.parametrize(("finish_seconds", "left"), [(0.2, None), (60.0, 0.2)])
def test_a_store_that_hangs_is_given_up_after_a_bounded_time(store, tmp_path, finish_seconds, left):
    tracker = tracker_of(store, tmp_path, finish_seconds=finish_seconds)
    tracker.log("trainer", 1, {"loss": 0.5})
    while not store.records:
        time.sleep(0.005)
    store.running.clear()
    tracker.log("trainer", 2, {"loss": math.nan})
    began = time.monotonic()
    assert not tracker.finish("KILLED", seconds=left)
    assert time.monotonic() - began < 5
    spooled = read_spool(tmp_path / "mlflow_spool.jsonl")
    assert [record.step for record in spooled.records] == [2]
    assert math.isnan(spooled.records[0].value)
    assert (spooled.status, spooled.run_id) == ("KILLED", tracker.run_id)
    store.running.set()
    tracker._thread.join(10)
    assert store.ended == []


def test_memory_is_bounded_while_the_store_is_away(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_tracker, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(mlflow_tracker, "RECORDS_IN_MEMORY", 100)
    store.down = True
    tracker = tracker_of(store, tmp_path)
    for step in range(250):
        tracker.log("trainer", step, {"loss": 1.0})
    while len(tracker._records) > 100:
        time.sleep(0.005)
    store.down = False
    assert not tracker.finish("FINISHED")
    spooled = read_spool(tmp_path / "mlflow_spool.jsonl")
    assert sorted(r.step for r in [*spooled.records, *store.records]) == list(range(250))


def test_a_spool_cut_short_by_a_crash_is_read_as_far_as_it_goes(store, tmp_path):
    store.down = True
    tracker = tracker_of(store, tmp_path)
    tracker.log("trainer", 1, {"loss": 0.5})
    tracker.finish("FINISHED")
    path = tmp_path / "mlflow_spool.jsonl"
    path.write_text(path.read_text()[:-5])
    spooled = read_spool(path)
    assert [r.step for r in spooled.records] == [1]
    assert spooled.status is None


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:sqlalchemy.exc.SADeprecationWarning")
def test_a_real_store_holds_what_was_logged(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    (tmp_path / "config.yaml").write_text("name: run\n")
    facts = RunFacts(uri, "tests", "run", {f"key{i}": "x" for i in range(150)}, {"version.torch": "2"}, 1000)
    tracker = MlflowTracker(
        lambda: facts, tmp_path, artifacts_at_start=[tmp_path / "config.yaml"], open_store=MlflowStore, finish_seconds=60
    )
    for step in range(50):
        tracker.log("trainer", step, {"loss": step / 2, "bad": math.nan})
    assert tracker.finish("FINISHED")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        read = lambda query: database.execute(query).fetchall()  # noqa: E731
        assert read("select count(*), max(step) from metrics where key = 'loss'") == [(50, 49)]
        assert read("select count(*) from metrics where key = 'bad' and is_nan = 1") == [(50,)]
        assert read("select count(*) from params") == [(150,)]
        assert read("select status, run_uuid, start_time from runs") == [("FINISHED", tracker.run_id, 1000)]
        assert ("version.torch", "2") in read("select key, value from tags")
    database.close()
    assert list((tmp_path / "mlruns").rglob("config.yaml"))


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:sqlalchemy.exc.SADeprecationWarning")
def test_the_short_way_into_sqlite_leaves_the_rows_that_mlflow_itself_would(tmp_path):
    batches = [
        [Record("a", 1.0, 10, 1), Record("a", 2.0, 10, 1), Record("b", float("nan"), 10, 1), Record("c", float("-inf"), 10, 1)],
        [Record("a", 0.5, 20, 0), Record("b", 4.0, 20, 2), Record("b", float("nan"), 30, 2), Record("a", 1.0, 10, 1)],
        [Record("b", 5.0, 20, 2), Record("a", 3.0, 40, 3)],
    ]
    stores = [MlflowStore(f"sqlite:///{tmp_path}/{name}.db") for name in ("ours", "theirs")]
    assert stores[0]._bulk is not None
    stores[1]._bulk = None
    tables = []
    for store, name in zip(stores, ("ours", "theirs"), strict=True):
        run_id = store.create(RunFacts("", "e", "r", {}, {}, 0))
        for batch in [*batches, batches[0]]:
            store.metrics(run_id, batch)
        with sqlite3.connect(tmp_path / f"{name}.db") as database:
            columns = "key, value, timestamp, step, is_nan"
            tables.append([sorted(database.execute(f"select {columns} from {t}")) for t in ("metrics", "latest_metrics")])
    assert tables[0] == tables[1]


def test_a_run_in_a_real_store_goes_on_after_its_end(tmp_path):
    store = MlflowStore(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = store.create(RunFacts("", "e", "r", {}, {}, 0))
    store.end(run_id, "KILLED", 10)
    assert store.reopen(run_id)
    assert store._client.get_run(run_id).info.status == "RUNNING"
    store._client.delete_run(run_id)
    assert not store.reopen(run_id)
    assert not store.reopen("0" * 32)


def test_a_configuration_becomes_parameters():
    config = {"name": "run", "reward": {"functions": [{"function": "mine.py:fn", "weight": 1.0}]}, "eval": None}
    assert flattened(config) == {
        "name": "run",
        "reward.functions.0.function": "mine.py:fn",
        "reward.functions.0.weight": "1.0",
        "eval": "None",
    }
    assert name_of("reward/größe (m)") == "reward/gr__e _m_"


def commit_of(folder):
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def test_tags_name_versions_and_the_commit_of_the_folder_or_else_of_asyncrl(tmp_path):
    assert {"version.asyncrl", "version.torch"} <= tags(tmp_path).keys()
    assert tags(tmp_path).get("mlflow.source.git.commit") == commit_of(Path(facts.__file__).parent)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    assert tags(tmp_path)["mlflow.source.git.commit"] == commit_of(tmp_path) != commit_of(Path(facts.__file__).parent)


def test_a_relative_database_means_the_directory_of_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert absolute_uri("sqlite:////data/mlflow.db") == "sqlite:////data/mlflow.db"
    assert absolute_uri("http://host:5000") == "http://host:5000"


def test_the_spool_is_plain_json(store, tmp_path):
    store.down = True
    tracker_of(store, tmp_path).finish("FINISHED")
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "mlflow_spool.jsonl").read_text().splitlines()]
    assert kinds == ["run", "end"]


def test_runs_that_start_on_a_new_database_at_once_all_get_in(tmp_path):
    """Each in a process of its own: MLflow makes the tables of a new database, and trips over another that does."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    script = (
        "import sys, mlflow.tracking\n"
        "from asyncrl.tracking.store import MlflowStore\n"
        "from asyncrl.tracking.spool import RunFacts\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"MlflowStore({uri!r}).create(RunFacts({uri!r}, 'sums', 'run', {{}}, {{}}, 0))\n"
    )
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    runs = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    for run in runs:
        _, said = run.communicate(timeout=120)
        assert (run.returncode, said) == (0, "")


def test_replaying_to_a_server_that_is_down_says_so_in_a_line_and_keeps_the_spool(tmp_path, monkeypatch, capsys):
    Spool(tmp_path, FACTS).end(None, "FINISHED", [], 1)

    def refuses(run_dir, *, uri=None):
        raise ConnectionError("no route\nand much more")

    monkeypatch.setattr("asyncrl.tracking.replay.replay", refuses)
    monkeypatch.setattr("sys.argv", ["replay", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        replay_main()
    assert "MLflow did not take it: no route\n" in capsys.readouterr().err
    assert (tmp_path / "mlflow_spool.jsonl").exists()
