"""Two ranks in processes of their own: the gradient of one, agreement on what is skipped, a peer that is late, one that dies.

The processes start once, go through `story`, and report; each test reads one part of the report.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from asyncrl.config.schema import Config
from asyncrl.engines.fsdp import FsdpLauncher
from asyncrl.engines.fsdp.process_group import RankGroup, open_meeting_point
from asyncrl.errors import TransportError
from tests.engines.algorithms import ALGORITHMS, REGULARISED
from tests.engines.training import VOCAB, batch, config, distance, engine_of_one_rank, poisoned, uneven_batch
from tests.models import tiny_model

DEADLINE_SECONDS = 240
pytestmark = pytest.mark.timeout(300)  # two processes import torch and transformers, on a machine that may be busy
SHORT_SECONDS = 2.0
EVERY_ALGORITHM = ALGORITHMS | REGULARISED


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, tie=True)


@pytest.fixture(scope="module")
def whole_algorithm(tmp_path_factory):
    """With a critic, a divergence in the reward from a reference that is not the policy, and an entropy bonus."""
    other = tiny_model(tmp_path_factory.mktemp("other"), vocab=VOCAB, tie=True, seed=1)
    return {
        "advantage": {"name": "gae", "gamma": 0.9},
        "critic": {"learning_rate": 1e-2},
        "kl": {"name": "k3", "coefficient": 0.1, "where": "reward", "adaptive": {"target": 0.1, "horizon": 100.0}},
        "reference": {"path": str(other)},
        "entropy_coefficient": 0.1,
    }


@pytest.fixture(scope="module")
def reports(model, uneven, whole_algorithm):
    """What both ranks reported, by rank."""
    context = multiprocessing.get_context("spawn")
    results, addresses = context.Queue(), context.Queue()
    settings = config(algorithm=whole_algorithm, training={"ranks": 2, "microbatch_tokens": 60}).to_mapping()
    arguments = (str(model), settings, uneven, addresses, results)
    processes = [context.Process(target=story, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield dict(results.get(timeout=DEADLINE_SECONDS) for _ in range(2))
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_SECONDS)


def story(rank, model_path, settings, uneven, addresses, results):
    """Train; then wait for a peer that is late; then for one that dies. Rank 0 is that peer."""
    os.environ["OMP_NUM_THREADS"] = "1"
    launcher = FsdpLauncher(Config.model_validate(settings), model_path=model_path, rank=rank)
    meeting_point = launcher.prepare()
    if rank == 0:
        addresses.put(meeting_point)
    engine = launcher.join(meeting_point or addresses.get(timeout=DEADLINE_SECONDS))
    report = train_and_report(engine, uneven)
    engine.close()
    store = shared_store(rank, addresses)
    report["late"] = wait_for_rank_zero(rank, store, "late", SHORT_SECONDS)
    if rank == 0:
        send(results, (rank, report))
    report["dead"] = wait_for_rank_zero(rank, store, "dead", 600.0)
    send(results, (rank, report))


def send(results, report):
    results.put(report)
    results.close()
    results.join_thread()


def shared_store(rank, addresses):
    if rank == 0:
        store, address = open_meeting_point()
        addresses.put(address)
        return store
    host, port = addresses.get(timeout=DEADLINE_SECONDS).rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False)


def wait_for_rank_zero(rank, store, how, timeout_seconds):
    """(seconds, type, text) of what rank 1 raises."""
    prefixed = dist.PrefixStore(how, store)
    group = RankGroup(rank=rank, world_size=2, store=prefixed, device=torch.device("cpu"), timeout_seconds=timeout_seconds)
    if rank:
        prefixed.set("rank 1 is there", "")
    else:
        prefixed.wait(["rank 1 is there"], timedelta(seconds=DEADLINE_SECONDS))  # it meets rank 0 alive
    began = time.monotonic()
    try:
        if rank == 0 and how == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            time.sleep(2 * timeout_seconds)
            return None
        group.broadcast(None)
    except TransportError as error:
        return time.monotonic() - began, type(error).__name__, str(error)
    finally:
        group.close()


def one_sequence(whole):
    """A batch with a single trainable response: one rank only keeps step."""
    first = whole.groups[0]
    mask = first.loss_mask & (np.arange(len(first.loss_mask)) < first.lengths[0])
    return replace(whole, groups=(replace(first, loss_mask=mask),))


def train_and_report(engine, uneven):
    gradients = {name: gradient.numpy() for name, gradient in engine.gradients(batch()).items()}
    alone = {name: gradient.numpy() for name, gradient in engine.gradients(one_sequence(batch(1))).items()}
    algorithms = {
        name: {parameter: gradient.numpy() for parameter, gradient in engine.gradients(uneven, algorithm).items()}
        for name, algorithm in EVERY_ALGORITHM.items()
    }
    outcomes = [engine.train(batch(mini_batches=2, epochs=2)), engine.train(poisoned(batch()))]
    weights = {name: parameter.full_tensor().detach().numpy() for name, parameter in engine.named_parameters()}
    heard = engine.broadcast(b"\x00x" * 100_000 if engine.rank == 0 else None)
    empty = engine.broadcast(b"" if engine.rank == 0 else None)
    figures = [(outcome.updates, outcome.bad_updates, dict(outcome.metrics)) for outcome in outcomes]
    return {
        "gradients": gradients,
        "alone": alone,
        "algorithms": algorithms,
        "outcomes": figures,
        "weights": weights,
        "coefficient": engine._reference.coefficient,
        "heard": (len(heard), empty),
    }


@pytest.fixture(scope="module")
def uneven(model):
    with engine_of_one_rank(model, config()) as engine:
        return uneven_batch(engine)


@pytest.fixture(scope="module")
def expected(model, uneven, whole_algorithm):
    with engine_of_one_rank(model, config(algorithm=whole_algorithm)) as engine:
        return train_and_report(engine, uneven)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["gradients", "alone"])
def test_two_ranks_have_the_gradient_of_one(reports, expected, rank, kind):
    assert any(gradient.any() for gradient in expected[kind].values())
    for name, gradient in expected[kind].items():
        torch.testing.assert_close(torch.tensor(reports[rank][kind][name]), torch.tensor(gradient), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_two_ranks_have_the_gradient_of_one_under_every_algorithm(reports, expected, name):
    whole = expected["algorithms"][name]
    assert any(gradient.any() for gradient in whole.values())
    assert max(distance(reports[rank]["algorithms"][name], whole) for rank in (0, 1)) <= 1e-5


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_arrive_at_the_weights_of_one(reports, expected, rank):
    for name, weight in expected["weights"].items():
        assert reports[rank]["weights"][name] == pytest.approx(weight, abs=2e-3), name


def test_every_rank_reports_the_same_and_what_one_rank_would(reports, expected):
    assert reports[0]["outcomes"] == reports[1]["outcomes"]
    for mine, theirs in zip(reports[0]["outcomes"], expected["outcomes"], strict=True):
        assert mine[:2] == theirs[:2]
        assert without_times(mine[2]) == pytest.approx(without_times(theirs[2]), rel=1e-3, abs=1e-3)


def without_times(metrics):
    """What does not depend on how fast the machine was."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_an_adaptive_coefficient_is_the_same_on_every_rank(reports, expected):
    assert reports[0]["coefficient"] == reports[1]["coefficient"] != 0.1
    assert reports[0]["coefficient"] == pytest.approx(expected["coefficient"], rel=1e-6)


def test_a_non_finite_loss_is_skipped_on_every_rank(reports):
    assert [report["outcomes"][1][:2] for report in reports.values()] == [(0, 1), (0, 1)]


def test_every_rank_hears_the_broadcast(reports):
    assert [report["heard"] for report in reports.values()] == [(200_000, b"")] * 2


def test_a_late_peer_runs_into_the_deadline(reports):
    seconds, kind, text = reports[1]["late"]
    assert kind == "DeadlineExceeded"
    assert SHORT_SECONDS <= seconds < 10 * SHORT_SECONDS
    assert "training.step_timeout_seconds" in text


def test_a_dead_peer_is_noticed_within_seconds(reports):
    seconds, kind, text = reports[1]["dead"]
    assert kind == "TransportError"
    assert seconds < 10
    assert "trainer/1: another trainer rank is gone" in text
