"""An engine's state, saved and loaded: one rank, two ranks, and from one number to the other.

The two ranks start once, go through `story`, and report; each test reads one part of the report.
"""

from __future__ import annotations

import json
import os
import random
import resource
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing

from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.config.schema import Config
from asyncrl.engines.fsdp import FsdpLauncher
from asyncrl.engines.fsdp.state import generator_state
from asyncrl.errors import CheckpointError
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank
from tests.models import tiny_model

DEADLINE_SECONDS = 240
pytestmark = pytest.mark.timeout(300)  # two processes import torch and transformers, on a machine that may be busy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


REFRESHED = {
    "kl": {"name": "k3", "coefficient": 0.1, "adaptive": {"target": 0.05, "horizon": 100.0}},
    "reference": {"refresh_every": 1},
}


def settings(**changes):
    """With everything that a checkpoint can hold but a critic."""
    return config(algorithm=REFRESHED, **changes)


def one_rank(model):
    return engine_of_one_rank(model, settings(), DcpFiles())


def train(engine, *seeds):
    """Loss of each step, the divergence's part included; each at a version of its own."""
    told = [engine.train(replace(batch(seed=seed, mini_batches=2), version=seed)).metrics for seed in seeds]
    return [metrics["loss/policy"] + metrics["loss/kl"] for metrics in told]


def weights(engine):
    """Of the policy and of its reference."""
    both = [("", engine.named_parameters()), ("reference.", engine._reference._model.hf_named_parameters())]
    return {prefix + name: parameter.full_tensor().detach().numpy().copy() for prefix, named in both for name, parameter in named}


def save(engine, folder):
    if engine.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    engine.broadcast(b"made" if engine.rank == 0 else None)
    held = engine.begin_save(str(folder))
    assert held >= 0
    return engine.finish_save(60.0)


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def drawn():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)


# ---- one rank --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(model):
    """(losses, weights) of four steps in a row."""
    with one_rank(model) as engine:
        losses = train(engine, 0, 1, 2, 3)
        return losses, weights(engine)


@pytest.fixture(scope="module")
def saved_by_one(model, tmp_path_factory):
    """The state after two of them, and what the generators gave next."""
    folder = tmp_path_factory.mktemp("one")
    with one_rank(model) as engine:
        train(engine, 0, 1)
        random.gauss(0, 1)  # its pair is kept for the next call: state beyond the words
        np.random.randn()
        save(engine, folder)
        return folder, drawn()


def test_two_steps_a_save_a_load_and_two_more_are_four_steps_bit_for_bit(model, undisturbed, saved_by_one):
    with one_rank(model) as engine:
        engine.load(str(saved_by_one[0]))
        assert train(engine, 2, 3) == undisturbed[0][2:]
        assert same(weights(engine), undisturbed[1])


def test_every_random_generator_goes_on_where_it_was(model, saved_by_one):
    with one_rank(model) as engine:
        engine.load(str(saved_by_one[0]))
        assert drawn() == saved_by_one[1]


def test_training_on_while_a_save_is_written_changes_nothing_of_it(model, saved_by_one, tmp_path):
    with one_rank(model) as engine:
        train(engine, 0, 1)
        engine.begin_save(str(tmp_path))
        train(engine, 2)
        engine.finish_save(60.0)
        assert engine.save_done()
    described = DcpFiles().describe(str(saved_by_one[0]))
    first, second = ({name: torch.zeros(shape) for name, (shape, kind) in described.items() if kind == "float32"} for _ in "ab")
    DcpFiles().read(str(saved_by_one[0]), first)
    DcpFiles().read(str(tmp_path), second)
    assert first
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_beside_the_tensors_lies_what_an_export_needs(saved_by_one):
    files = sorted(path.name for path in (saved_by_one[0] / "model").iterdir())
    assert files == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert json.loads((saved_by_one[0] / "model" / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_engine_that_never_trained_is_saved_and_loaded_too(model, undisturbed, tmp_path):
    with one_rank(model) as engine:
        save(engine, tmp_path)
    with one_rank(model) as engine:
        engine.load(str(tmp_path))
        assert train(engine, 0, 1, 2, 3) == undisturbed[0]


def test_a_checkpoint_of_another_model_is_refused_by_the_first_difference(saved_by_one, tmp_path):
    other = tiny_model(tmp_path / "other", vocab=VOCAB, tie=True, hidden=64)
    words = r"embed_tokens.weight is float32\[40, 32\] there and float32\[40, 64\] here: set model.path"
    with one_rank(other) as engine, pytest.raises(CheckpointError, match=words):
        engine.load(str(saved_by_one[0]))
    deeper = tiny_model(tmp_path / "deeper", vocab=VOCAB, tie=True, layers=3)
    with one_rank(deeper) as engine, pytest.raises(CheckpointError, match=r"layers\.2\..* is missing there"):
        engine.load(str(saved_by_one[0]))


class SlowFiles(DcpFiles):
    """Writes when it is let."""

    def __init__(self):
        self.let = threading.Event()

    def write(self, folder, tensors, group):
        self.let.wait(DEADLINE_SECONDS)
        super().write(folder, tensors, group)


def test_a_write_that_hangs_fails_its_save_in_time_and_the_next_once_it_ended_works(model, tmp_path):
    files = SlowFiles()
    with engine_of_one_rank(model, settings(), files) as engine:
        for name in ("hangs", "still", "works"):
            (tmp_path / name).mkdir()
        engine.begin_save(str(tmp_path / "hangs"))
        assert not engine.save_done()
        with pytest.raises(CheckpointError, match=r"raise checkpoint.timeout_seconds"):
            engine.finish_save(0.05)
        engine.begin_save(str(tmp_path / "still"))
        with pytest.raises(CheckpointError, match="still hangs in a write"):
            engine.finish_save(10.0)
        files.let.set()
        hung = engine._saver._hung.thread
        hung.join(DEADLINE_SECONDS)
        engine.begin_save(str(tmp_path / "works"))
        engine.finish_save(60.0)
        train(engine, 0)


# ---- two ranks, and from one number to the other ------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(model, saved_by_one, tmp_path_factory):
    """(what both ranks reported, by rank; the folder of what they saved)."""
    context = multiprocessing.get_context("spawn")
    results, addresses = context.Queue(), context.Queue()
    folder = tmp_path_factory.mktemp("two")
    two = settings(training={"ranks": 2}).to_mapping()
    arguments = (str(model), two, folder, saved_by_one[0], addresses, results)
    processes = [context.Process(target=story, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield dict(results.get(timeout=DEADLINE_SECONDS) for _ in range(2)), folder
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_SECONDS)


def story(rank, model_path, two, folder, saved_by_one, addresses, results):
    os.environ["OMP_NUM_THREADS"] = "1"

    def joined():
        launcher = FsdpLauncher(Config.model_validate(two), model_path=model_path, rank=rank, files=DcpFiles())
        meeting_point = launcher.prepare()
        if rank == 0:
            addresses.put(meeting_point)
        return launcher.join(meeting_point or addresses.get(timeout=DEADLINE_SECONDS))

    report = {}
    engine = joined()
    train(engine, 0, 1)
    random.seed(rank)
    save(engine, folder / "saved")
    report["next"] = random.random()
    report["full"] = save_on_a_full_disk(engine, folder / "full")
    report["denied"] = save_into(engine, folder / "nowhere" / "below")
    save(engine, folder / "after")
    report["losses"], report["weights"] = train(engine, 2, 3), weights(engine)
    engine.close()
    engine = joined()
    engine.load(str(folder / "saved"))
    report["next again"] = random.random()
    report["losses again"], report["weights again"] = train(engine, 2, 3), weights(engine)
    engine.close()
    engine = joined()
    engine.load(str(saved_by_one))
    states = generator_state(rank, torch.device("cpu"))
    report["generators"] = {name.split(".")[-1]: state.tolist() for name, state in states.items()}
    report["losses of one"] = train(engine, 2, 3)
    report["damaged"] = load_of(engine, folder / "full")
    engine.close()
    results.put((rank, report))
    results.close()
    results.join_thread()


def save_on_a_full_disk(engine, folder):
    """Full for rank 1 alone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        return save_into(engine, folder, make=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_into(engine, folder, *, make=False):
    """What both ranks are told."""
    if make and engine.rank == 0:
        folder.mkdir()
    elif engine.rank == 0:
        folder.parent.write_text("no folder")
    engine.broadcast(b"ready" if engine.rank == 0 else None)
    try:
        engine.begin_save(str(folder))
        engine.finish_save(60.0)
    except CheckpointError as error:
        return str(error)
    return ""


def load_of(engine, folder):
    try:
        engine.load(str(folder))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_go_on_from_their_save_bit_for_bit(reports, rank):
    report = reports[0][rank]
    assert report["losses again"] == report["losses"]
    assert same(report["weights again"], report["weights"])
    assert report["next again"] == report["next"]
    assert reports[0][0]["next"] != reports[0][1]["next"], "each rank has generators of its own"


def test_a_save_of_two_ranks_goes_on_on_one(model, reports, undisturbed):
    with one_rank(model) as engine:
        engine.load(str(reports[1] / "saved"))
        losses = train(engine, 2, 3)
    assert losses == pytest.approx(reports[0][0]["losses"], abs=1e-5)
    assert losses == pytest.approx(undisturbed[0][2:], abs=1e-5)


def test_a_save_of_one_rank_goes_on_on_two(reports, undisturbed):
    for rank in (0, 1):
        assert reports[0][rank]["losses of one"] == pytest.approx(undisturbed[0][2:], abs=1e-5)


def test_a_rank_that_did_not_exist_has_generators_of_its_own(reports):
    mine, others = reports[0][0]["generators"], reports[0][1]["generators"]
    assert mine.keys() == others.keys() == {"torch", "numpy", "python"}
    assert all(mine[name] != others[name] for name in mine)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_both_with_reason_and_fix(reports, rank):
    text = reports[0][rank]["full"]
    assert "gave 'File too large': make room on the disk or quota" in text
    assert reports[0][rank]["denied"].count("Not a directory") == 1
    assert "use another" in reports[0][rank]["damaged"]


def test_after_failed_saves_the_next_one_is_whole(model, reports):
    with one_rank(model) as engine:
        engine.load(str(reports[1] / "after"))
        assert train(engine, 2, 3) == pytest.approx(reports[0][0]["losses"], abs=1e-5)
