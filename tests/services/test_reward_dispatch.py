"""Which samples go to which worker."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.services.reward.dispatch import Dispatcher, Job, WorkerView


def worker(name="reward/0", *, serial=True, slots=4, incarnation="a"):
    return WorkerView(name, incarnation, f"address of {name}", ("response",), serial, slots)


def jobs(count, first=0):
    return [Job(key, {}) for key in range(first, first + count)]


def keys(batch):
    return [job.key for job in batch.jobs]


def test_cheap_samples_that_wait_together_travel_together():
    dispatcher = Dispatcher()
    dispatcher.register(worker(), 0.0)
    dispatcher.submit(jobs(8))
    assert keys(dispatcher.assign()) == list(range(8))
    assert dispatcher.assign() is None


def test_dear_samples_spread_over_the_workers():
    dispatcher = Dispatcher()
    dispatcher.register(worker("reward/0"), 0.0)
    dispatcher.submit(jobs(1))
    dispatcher.finish(dispatcher.assign(), seconds=1.0)
    dispatcher.register(worker("reward/1"), 0.0)
    dispatcher.submit(jobs(8))
    batches = []
    while (batch := dispatcher.assign()) is not None:
        batches.append(batch)
    assert [len(batch.jobs) for batch in batches] == [1, 1, 1, 1]
    assert sorted(batch.worker.name for batch in batches) == ["reward/0", "reward/0", "reward/1", "reward/1"]


def test_a_serial_worker_has_at_most_two_batches():
    dispatcher = Dispatcher()
    dispatcher.register(worker(), 0.0)
    for first in range(3):
        dispatcher.submit(jobs(1, first))
        batch = dispatcher.assign()
        assert (batch is None) == (first == 2)
    assert dispatcher.num_waiting == 1


def test_a_concurrent_worker_has_at_most_its_slots():
    dispatcher = Dispatcher()
    dispatcher.register(worker(serial=False, slots=4), 0.0)
    dispatcher.submit(jobs(10))
    first = dispatcher.assign()
    assert keys(first) == [0, 1, 2, 3]
    assert dispatcher.assign() is None
    dispatcher.finish(first, 1.0)
    assert [keys(dispatcher.assign()) for _ in range(4)] == [[4], [5], [6], [7]]
    assert dispatcher.assign() is None


def test_evaluation_yields_to_rollouts():
    dispatcher = Dispatcher()
    dispatcher.submit(jobs(2, first=100), evaluation=True)
    dispatcher.submit(jobs(2))
    dispatcher.register(worker(), 0.0)
    assert keys(dispatcher.assign()) == [0, 1]
    assert keys(dispatcher.assign()) == [100, 101]


def test_samples_of_a_lost_worker_go_again_one_by_one_so_that_none_fails_for_its_neighbour():
    dispatcher = Dispatcher()
    dispatcher.register(worker(), 0.0)
    dispatcher.submit(jobs(2))
    dispatcher.assign()
    dispatcher.submit(jobs(2, first=2))
    assert dispatcher.silent(11.0, 10.0) == ["reward/0"]
    assert dispatcher.lose("reward/0") == []
    dispatcher.register(worker("reward/1"), 11.0)
    assert keys(dispatcher.assign()) == [0]
    assert dispatcher.assign() is None, "nothing goes with it"
    assert [job.key for job in dispatcher.lose("reward/1")] == [0]
    dispatcher.register(worker("reward/2"), 12.0)
    alone = dispatcher.assign()
    assert keys(alone) == [1]
    dispatcher.finish(alone, 0.0001)
    assert keys(dispatcher.assign()) == [2, 3]


def test_others_go_on_while_a_worker_runs_dry_for_a_sample_that_goes_alone():
    dispatcher = Dispatcher()
    for name in ("reward/0", "reward/1"):
        dispatcher.register(worker(name), 0.0)
    dispatcher.submit(jobs(1))
    dispatcher.assign()
    dispatcher.lose("reward/0")
    dispatcher.register(worker("reward/2", serial=False), 1.0)
    dispatcher.submit(jobs(1, first=1))
    assert keys(dispatcher.assign()) == [0]
    assert keys(dispatcher.assign()) == [1]


@pytest.mark.parametrize("deaths", [1, 2, 3, 5])
def test_a_sample_fails_with_the_last_of_the_workers_that_it_may_be_lost_with(deaths):
    dispatcher = Dispatcher(deaths)
    dispatcher.submit(jobs(3))
    failed = []
    for life in range(100):
        failed += dispatcher.register(worker(incarnation=str(life)), 0.0)
        batch = dispatcher.assign()
        if batch is None:
            break
        if all(job.key for job in batch.jobs):  # sample 0 kills
            dispatcher.finish(batch, 0.1)
    assert [job.key for job in failed] == ([0, 1, 2] if deaths == 1 else [0])
    assert dispatcher.num_waiting == dispatcher.num_assigned == 0
    assert failed[0].losses == deaths


def test_a_restarted_worker_has_lost_what_its_predecessor_held():
    dispatcher = Dispatcher()
    dispatcher.register(worker(), 0.0)
    dispatcher.submit(jobs(2))
    batch = dispatcher.assign()
    assert dispatcher.register(worker(), 1.0) == []
    assert dispatcher.num_waiting == 0
    assert dispatcher.register(worker(incarnation="b"), 2.0) == []
    assert dispatcher.num_waiting == 2
    assert not dispatcher.finish(batch, 0.1)


def test_a_batch_that_was_not_done_is_tried_again_once_by_a_living_worker():
    dispatcher = Dispatcher()
    dispatcher.register(worker(), 0.0)
    dispatcher.submit(jobs(1))
    assert dispatcher.give_up(dispatcher.assign()) == []
    assert [job.key for job in dispatcher.give_up(dispatcher.assign())] == [0]


@given(
    st.lists(st.sampled_from(["submit", "assign", "assign", "finish", "lose", "give up", "register"]), max_size=60), st.randoms()
)
@settings(max_examples=200, deadline=None)
def test_no_sample_is_lost_or_done_twice(moves, random):
    dispatcher, batches, done, failed, submitted, starts = Dispatcher(), [], [], [], 0, 0
    for move in moves:
        batch = batches.pop(random.randrange(len(batches))) if batches and move in ("finish", "give up") else None
        match move:
            case "submit":
                dispatcher.submit(jobs(3, submitted), evaluation=random.random() < 0.3)
                submitted += 3
            case "assign":
                if (new := dispatcher.assign()) is not None:
                    batches.append(new)
            case "finish" if batch and dispatcher.finish(batch, random.random()):
                done += keys(batch)
            case "give up" if batch:
                failed += [job.key for job in dispatcher.give_up(batch)]
            case "lose" if dispatcher.num_workers:
                failed += [job.key for job in dispatcher.lose(random.choice(list(dispatcher._workers)))]
            case "register":
                starts += 1
                view = worker(f"reward/{starts % 3}", serial=starts % 2 == 0, slots=2, incarnation=str(starts))
                failed += [job.key for job in dispatcher.register(view, 0.0)]
    assert len(done) + len(failed) + dispatcher.num_waiting + dispatcher.num_assigned == submitted
    assert len(set(done + failed)) == len(done + failed)
