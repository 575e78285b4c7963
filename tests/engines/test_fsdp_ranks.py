"""Two ranks in processes of their own: the gradient of one, agreement on what is skipped, a dead peer that is noticed."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.multiprocessing as multiprocessing

from asyncrl.errors import TransportError
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank, poisoned
from tests.models import tiny_model

DEADLINE_SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


@pytest.fixture
def ranks(model):
    """Start `target(engine, results)` on two ranks; results by rank. Every process is gone afterwards."""
    context = multiprocessing.get_context("spawn")
    processes, results, addresses = [], context.Queue(), context.Queue()

    def start(target, settings):
        for rank in range(2):
            process = context.Process(target=run_rank, args=(rank, str(model), settings.to_mapping(), target, addresses, results))
            process.start()
            processes.append(process)
        return processes, results

    yield start
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(DEADLINE_SECONDS)


def run_rank(rank, model_path, settings, target, addresses, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    from asyncrl.config.schema import Config
    from asyncrl.engines.fsdp import FsdpLauncher

    launcher = FsdpLauncher(Config.model_validate(settings), model_path=model_path, rank=rank)
    address = launcher.prepare()
    if rank == 0:
        addresses.put(address)
    engine = launcher.join(address or addresses.get(timeout=DEADLINE_SECONDS))
    results.put((rank, target(engine)))
    engine.close()


def train_and_report(engine):
    gradients = {name: gradient.numpy() for name, gradient in engine.gradients(batch()).items()}
    alone = {name: gradient.numpy() for name, gradient in engine.gradients(batch(1, seed=3)).items()}
    outcomes = [engine.train(batch(mini_batches=2, epochs=2)), engine.train(poisoned(batch()))]
    weights = {name: parameter.full_tensor().detach().numpy() for name, parameter in engine.named_parameters()}
    heard = engine.broadcast(b"\x00x" * 100_000 if engine.rank == 0 else None)
    empty = engine.broadcast(b"" if engine.rank == 0 else None)
    figures = [(outcome.updates, outcome.bad_updates, dict(outcome.metrics)) for outcome in outcomes]
    return {"gradients": gradients, "alone": alone, "outcomes": figures, "weights": weights, "heard": (len(heard), empty)}


def test_two_ranks_compute_what_one_does(model, ranks):
    _, results = ranks(train_and_report, config(training={"ranks": 2, "microbatch_tokens": 60}))
    found = dict(results.get(timeout=DEADLINE_SECONDS) for _ in range(2))
    with engine_of_one_rank(model, config()) as engine:
        expected = train_and_report(engine)
    for rank in range(2):
        assert found[rank]["heard"] == (200_000, b"")
        for kind in ("gradients", "alone"):
            for name, gradient in expected[kind].items():
                torch.testing.assert_close(torch.tensor(found[rank][kind][name]), torch.tensor(gradient), atol=1e-5, rtol=1e-4)
        for name, weight in expected["weights"].items():
            assert found[rank]["weights"][name] == pytest.approx(weight, abs=2e-3)
        for mine, theirs in zip(found[rank]["outcomes"], expected["outcomes"], strict=True):
            assert mine[:2] == theirs[:2]
            assert mine[2] == pytest.approx(theirs[2], rel=1e-3, abs=1e-3)
    assert found[0]["outcomes"] == found[1]["outcomes"], "every rank reports the same"


def wait_for_a_peer_that_dies(engine):
    if engine.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        engine.broadcast(None)
    except TransportError as error:
        return time.monotonic() - began, str(error)
    return None


def test_a_dead_peer_is_noticed_within_seconds(ranks):
    _, results = ranks(wait_for_a_peer_that_dies, config(training={"ranks": 2}))
    rank, (seconds, text) = results.get(timeout=DEADLINE_SECONDS)
    assert rank == 1
    assert seconds < 10
    assert "trainer/1: another trainer rank is gone" in text


def wait_for_a_peer_that_is_late(engine):
    if engine.rank == 0:
        time.sleep(6)
        return None
    try:
        engine.broadcast(None)
    except TransportError as error:
        return type(error).__name__, str(error)
    return None


def test_a_silent_peer_runs_into_the_deadline(ranks):
    _, results = ranks(wait_for_a_peer_that_is_late, config(training={"ranks": 2, "step_timeout_seconds": 2.0}))
    found = dict(results.get(timeout=DEADLINE_SECONDS) for _ in range(2))
    assert found[1][0] == "DeadlineExceeded"
    assert "training.step_timeout_seconds" in found[1][1]
