"""Two ranks in processes of their own: the gradient of one, agreement on what is skipped, a dead peer that is noticed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing

from asyncrl.config.schema import Config
from asyncrl.engines.fsdp.process_group import RankGroup, open_meeting_point
from asyncrl.errors import TransportError
from tests.engines.training import VOCAB, batch, config, engine_of_one_rank, poisoned
from tests.models import tiny_model

DEADLINE_SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


@pytest.fixture
def ranks():
    """Start `target(rank, addresses, *arguments)` on two ranks; what they return, by rank. No process is left afterwards."""
    context = multiprocessing.get_context("spawn")
    processes, results, addresses = [], context.Queue(), context.Queue()

    def start(target, *arguments):
        for rank in range(2):
            process = context.Process(target=run_rank, args=(target, rank, addresses, results, arguments))
            process.start()
            processes.append(process)
        return results

    yield start
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(DEADLINE_SECONDS)


def run_rank(target, rank, addresses, results, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    results.put((rank, target(rank, addresses, *arguments)))


def train_on_two_ranks(rank, addresses, model_path, settings):
    from asyncrl.engines.fsdp import FsdpLauncher

    launcher = FsdpLauncher(Config.model_validate(settings), model_path=model_path, rank=rank)
    address = launcher.prepare()
    if rank == 0:
        addresses.put(address)
    engine = launcher.join(address or addresses.get(timeout=DEADLINE_SECONDS))
    report = train_and_report(engine)
    engine.close()
    return report


def one_sequence(whole):
    """A batch with a single trainable response: one rank only keeps step."""
    first = whole.groups[0]
    mask = first.loss_mask & (np.arange(len(first.loss_mask)) < first.lengths[0])
    return replace(whole, groups=(replace(first, loss_mask=mask),))


def train_and_report(engine):
    gradients = {name: gradient.numpy() for name, gradient in engine.gradients(batch()).items()}
    alone = {name: gradient.numpy() for name, gradient in engine.gradients(one_sequence(batch(1))).items()}
    outcomes = [engine.train(batch(mini_batches=2, epochs=2)), engine.train(poisoned(batch()))]
    weights = {name: parameter.full_tensor().detach().numpy() for name, parameter in engine.named_parameters()}
    heard = engine.broadcast(b"\x00x" * 100_000 if engine.rank == 0 else None)
    empty = engine.broadcast(b"" if engine.rank == 0 else None)
    figures = [(outcome.updates, outcome.bad_updates, dict(outcome.metrics)) for outcome in outcomes]
    return {"gradients": gradients, "alone": alone, "outcomes": figures, "weights": weights, "heard": (len(heard), empty)}


def test_two_ranks_compute_what_one_does(model, ranks):
    settings = config(training={"ranks": 2, "microbatch_tokens": 60})
    results = ranks(train_on_two_ranks, str(model), settings.to_mapping())
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


def join_group(rank, addresses, timeout_seconds):
    store, address = open_meeting_point() if rank == 0 else (None, addresses.get(timeout=DEADLINE_SECONDS))
    if rank == 0:
        addresses.put(address)
    store = store or torch.distributed.TCPStore(*split_address(address), is_master=False)
    device = torch.device("cpu")
    return RankGroup(rank=rank, world_size=2, store=store, device=device, timeout_seconds=timeout_seconds)


def split_address(address):
    host, port = address.rsplit(":", 1)
    return host, int(port)


def wait_for_a_peer(rank, addresses, timeout_seconds, peer_dies):
    """Rank 1 waits for rank 0, which dies or sleeps: (seconds, type, text) of what it raised."""
    group = join_group(rank, addresses, timeout_seconds)
    if rank == 0 and peer_dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        time.sleep(2 * timeout_seconds)
        return None
    began = time.monotonic()
    try:
        group.broadcast(None)
    except TransportError as error:
        return time.monotonic() - began, type(error).__name__, str(error)
    return None


def test_a_dead_peer_is_noticed_within_seconds(ranks):
    results = ranks(wait_for_a_peer, 600.0, True)
    rank, (seconds, kind, text) = results.get(timeout=DEADLINE_SECONDS)
    assert (rank, kind) == (1, "TransportError")
    assert seconds < 10
    assert "trainer/1: another trainer rank is gone" in text


def test_a_silent_peer_runs_into_the_deadline(ranks):
    results = ranks(wait_for_a_peer, 2.0, False)
    rank, (_, kind, text) = results.get(timeout=DEADLINE_SECONDS)
    assert (rank, kind) == (1, "DeadlineExceeded")
    assert "training.step_timeout_seconds" in text
