"""The scheduler and the slot table: plain values, no torch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engines.embedded.scheduler import Scheduler
from asyncrl.engines.embedded.sequences import Sampling, Sequence


def sequence(rid: str, prompt=(5, 6, 7), **sampling) -> Sequence:
    sampling.setdefault("max_new_tokens", 3)
    return Sequence(rid=rid, prompt=np.asarray(prompt, np.int32), sampling=Sampling(**sampling))


def scheduler(max_slots: int = 4, context: int = 32) -> Scheduler:
    return Scheduler(max_slots=max_slots, context=context, version="default")


def step(machine: Scheduler, token: int = 9):
    n = len(machine.running)
    return machine.record(np.full(n, token, np.int32), np.full(n, -0.5, np.float32))


def test_first_come_is_first_served():
    machine = scheduler(max_slots=2)
    machine.add(sequence(rid, prompt=(5, number)) for number, rid in enumerate("abc"))
    machine.admit(1000)
    assert [one.rid for one in machine.running] == ["a", "b"]
    assert [one.rid for one in machine.waiting] == ["c"]


def test_equal_prompts_enter_as_one_admission():
    machine = scheduler()
    machine.add([sequence("a"), sequence("b", prompt=(1, 2)), sequence("c")])
    shared, other = machine.admit(1000)
    assert (shared.slots, shared.donor, shared.prefix_tokens) == ((0, 2), None, 2)
    assert (other.slots, other.donor) == ((1,), None)


def test_prefill_is_rationed_but_one_prompt_always_enters():
    machine = scheduler()
    machine.add(sequence(rid, prompt=range(2, 22 + number)) for number, rid in enumerate("abc"))
    assert len(machine.admit(10)) == 1
    assert len(machine.admit(45)) == 2


def test_a_running_sequence_lends_its_prefix_only_under_the_same_weights():
    machine = scheduler()
    machine.add([sequence("a", max_new_tokens=20)])
    machine.admit(100)
    step(machine)
    machine.add([sequence("b", max_new_tokens=20)])
    (same,) = machine.admit(100)
    assert same.donor == 0
    machine.committed("1.1", recomputed=False)
    machine.add([sequence("c", max_new_tokens=20)])
    (fresh,) = machine.admit(100)
    assert fresh.donor is None
    machine.committed("1.2", recomputed=True)
    machine.add([sequence("d")])
    (after_recompute,) = machine.admit(100)
    assert after_recompute.donor == 0


def test_spans_name_the_first_token_of_each_version_and_skip_versions_that_computed_nothing():
    machine = scheduler()
    machine.add([sequence("a", max_new_tokens=3)])
    machine.admit(100)
    step(machine)
    machine.committed("1.1", recomputed=False)
    machine.committed("1.2", recomputed=False)
    step(machine)
    (update,), _ = step(machine)
    assert update.spans == (("default", 0), ("1.2", 1))


def test_streaming_updates_come_at_their_interval_and_at_the_end():
    machine = scheduler()
    machine.add([sequence("a", max_new_tokens=5, stream_interval=2), sequence("b", max_new_tokens=5)])
    machine.admit(100)
    told = [
        [(update.sequence.rid, len(update.token_ids), update.finish is not None) for update in step(machine)[0]] for _ in range(5)
    ]
    assert told == [[], [("a", 2, False)], [], [("a", 4, False)], [("a", 5, True), ("b", 5, True)]]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    max_slots=st.integers(1, 6),
    aborts=st.sets(st.integers(0, 29)),
    abort_at=st.integers(0, 10),
)
def test_every_sequence_leaves_exactly_once_with_its_own_tokens_whatever_the_order(lengths, max_slots, aborts, abort_at):
    """Tokens are functions of (sequence, position), so a slot moved wrongly would show."""
    machine = scheduler(max_slots=max_slots)
    sequences = [
        sequence(str(number), prompt=(number, number % 3), max_new_tokens=length) for number, length in enumerate(lengths)
    ]
    machine.add(sequences)
    mirror: list[str] = []  # what a cache that follows admissions and moves holds in each slot
    finished = {}
    for steps in range(400):
        if not machine.busy:
            break
        for admission in machine.admit(6):
            for slot in admission.slots:
                mirror[slot:] = [machine.running[slot].rid]
        assert mirror == [one.rid for one in machine.running]
        rounds = []
        if steps == abort_at:
            rounds.append(machine.abort(lambda one: int(one.rid) in aborts, "enough"))
        n = len(machine.running) - 0
        if n and not rounds:
            tokens = np.asarray(
                [100 * int(one.rid) + machine.table.generated[slot] for slot, one in enumerate(machine.running)], np.int32
            )
            rounds.append(machine.record(tokens, np.zeros(n, np.float32)))
        for updates, moves in rounds:
            for update in updates:
                assert update.sequence.rid not in finished
                finished[update.sequence.rid] = update
            if moves is not None:
                for source, target in zip(moves.source, moves.target, strict=True):
                    mirror[target] = mirror[source]
                del mirror[len(machine.running) :]
    assert sorted(finished, key=int) == [one.rid for one in sequences]
    for one, length in zip(sequences, lengths, strict=True):
        update = finished[one.rid]
        assert update.token_ids.tolist() == [100 * int(one.rid) + position for position in range(len(update.token_ids))]
        assert len(update.token_ids) == length or update.finish.kind == "abort"
