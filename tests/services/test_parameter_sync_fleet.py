"""The fleet and the slots: who takes traffic, what goes where, which slot is free."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import NotRegistered, StaleIncarnation, SyncError
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.services.parameter_sync.fleet import RETRY_SECONDS, Content, FleetState, Transfer

A, B = "inference/0", "inference/1"


def a_fleet(*names: str, ranks: int = 1) -> FleetState:
    fleet = FleetState(silence_seconds=10)
    for name in names or (A,):
        fleet.add(name, f"http://{name}", 0.0)
        fleet.heard(name, "first", 0.0)
    fleet.open_incarnation(1, ranks)
    return fleet


def publish(fleet: FleetState, version: int, ranks: int = 1) -> int:
    slot = fleet.acquire(fleet.incarnation, version)
    for rank in range(ranks):
        fleet.staged(fleet.incarnation, rank, version, slot)
    return slot


def begin(fleet: FleetState, name: str = A, now: float = 0.0) -> Transfer:
    transfer = fleet.next_transfer(name, now)
    assert transfer is not None
    return transfer


def bring(fleet: FleetState, name: str = A, now: float = 0.0) -> None:
    assert fleet.confirm(begin(fleet, name, now), now)


def test_a_server_starts_without_traffic_and_is_ready_once_it_confirms():
    fleet = a_fleet()
    assert (fleet.state_of(A), fleet.confirmed) == ("STARTING", None)
    publish(fleet, 0)
    bring(fleet)
    assert (fleet.state_of(A), fleet.confirmed) == ("READY", 0)


def test_a_server_that_its_owner_starts_again_is_restarting_until_it_is_heard_and_ready_only_with_the_current_version():
    fleet = a_fleet(A, B)
    publish(fleet, 0)
    bring(fleet, A)
    bring(fleet, B)
    fleet.restarts(A, "killed")
    assert (fleet.state_of(A), fleet.reason_of(A), fleet.is_confirmed(0)) == ("RESTARTING", "killed", False)
    assert not fleet.missed(A, 100.0), "it is known to be away"
    assert not fleet.missed(A, 100.0)
    publish(fleet, 1)
    bring(fleet, B, 1.0)
    fleet.heard(A, "second", 2.0)
    assert fleet.state_of(A) == "STALE"
    bring(fleet, A, 2.0)
    assert (fleet.state_of(A), fleet.version_of(A)) == ("READY", 1)


def test_nobody_waits_for_a_server_that_was_given_up_or_retired():
    fleet = a_fleet(A, B, "inference/2")
    publish(fleet, 0)
    for name in (A, B, "inference/2"):
        bring(fleet, name)
    assert not fleet.give_up(B, "no memory")
    fleet.retire("inference/2")
    assert (fleet.state_of(B), fleet.state_of("inference/2")) == ("DEAD", "RETIRED")
    publish(fleet, 1)
    assert fleet.next_transfer("inference/2", 1.0) is None
    assert fleet.next_transfer(B, 1.0) is None
    bring(fleet, A, 1.0)
    assert fleet.is_confirmed(1)
    assert fleet.confirmed == 1
    assert fleet.give_up(A, "no memory either"), "none is left"
    assert fleet.given_up() == {A: "no memory either", B: "no memory"}


def test_a_server_takes_traffic_while_a_newer_version_travels():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    publish(fleet, 1)
    transfer = begin(fleet)
    assert (fleet.state_of(A), fleet.confirmed, fleet.published) == ("UPDATING", 0, 1)
    fleet.confirm(transfer, 1.0)
    assert (fleet.state_of(A), fleet.confirmed) == ("READY", 1)


def test_a_version_is_published_when_the_last_rank_has_staged_it():
    fleet = a_fleet(ranks=2)
    slot = fleet.acquire(1, 0)
    assert not fleet.staged(1, 0, 0, slot)
    assert fleet.next_transfer(A, 0.0) is None
    assert fleet.staged(1, 1, 0, slot)
    assert begin(fleet).version == PolicyVersion(1, 0)


def test_a_slot_that_is_read_is_not_given_and_versions_are_skipped_instead():
    fleet = a_fleet()
    read = publish(fleet, 0)
    transfer = begin(fleet)
    others = {publish(fleet, version) for version in (1, 2, 3)}
    assert others == {1 - read}
    fleet.confirm(transfer, 0.0)
    assert begin(fleet).version == PolicyVersion(1, 3)


def test_a_stage_whose_slot_was_given_away_meanwhile_is_ignored():
    fleet = a_fleet(ranks=2)
    publish(fleet, 0, ranks=2)
    begin(fleet)
    slot = fleet.acquire(1, 1)
    fleet.staged(1, 0, 1, slot)
    assert fleet.acquire(1, 2) == slot
    assert not fleet.staged(1, 1, 1, slot)
    assert not fleet.staged(1, 0, 2, slot)
    assert fleet.staged(1, 1, 2, slot)


def test_servers_read_from_one_slot_at_a_time_so_the_trainer_always_has_the_other():
    fleet = a_fleet(A, B)
    publish(fleet, 0)
    slow, fast = begin(fleet, A), begin(fleet, B)
    fleet.confirm(fast, 0.0)
    publish(fleet, 1)
    assert fleet.next_transfer(B, 0.0) is None
    fleet.confirm(slow, 0.0)
    assert begin(fleet, B).version.version == 1


def test_a_server_that_holds_every_slice_holds_no_slot_while_it_waits_to_commit():
    fleet = a_fleet(A, B)
    publish(fleet, 0)
    slow, fast = begin(fleet, A), begin(fleet, B)
    fleet.confirm(fast, 0.0)
    fleet.transferred(slow)
    publish(fleet, 1)
    assert begin(fleet, B).version.version == 1
    assert fleet.next_transfer(A, 0.0) is None
    fleet.confirm(slow, 0.0)
    assert begin(fleet, A).version.version == 1


def test_a_server_past_its_deadline_is_stale_its_slot_free_and_it_is_tried_again_from_the_newest():
    fleet = a_fleet(A, B)
    publish(fleet, 0)
    bring(fleet, B)
    bring(fleet, A)
    publish(fleet, 1)
    slow = begin(fleet, A)
    fleet.fail(slow, "DeadlineExceeded: too slow", 5.0)
    assert (fleet.state_of(A), fleet.reason_of(A)) == ("STALE", "DeadlineExceeded: too slow")
    assert fleet.confirmed == 0
    publish(fleet, 2)
    bring(fleet, B)
    assert fleet.confirmed == 2
    assert fleet.next_transfer(A, 5.0 + RETRY_SECONDS / 2) is None
    assert begin(fleet, A, 5.0 + RETRY_SECONDS).version.version == 2


def test_a_late_confirmation_of_a_transfer_that_was_given_up_changes_nothing():
    fleet = a_fleet()
    publish(fleet, 0)
    late = begin(fleet)
    fleet.fail(late, "late", 0.0)
    assert not fleet.confirm(late, 1.0)
    assert (fleet.state_of(A), fleet.confirmed) == ("STALE", None)


def test_slices_that_arrive_wrong_make_a_server_stale_until_it_confirms():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    publish(fleet, 1)
    transfer = begin(fleet)
    fleet.refused(transfer)
    assert (fleet.state_of(A), fleet.confirmed) == ("STALE", None)
    fleet.confirm(transfer, 0.0)
    assert fleet.state_of(A) == "READY"


def test_a_restarted_server_is_stale_until_it_confirms_the_current_version():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    assert fleet.heard(A, "second", 1.0)
    assert (fleet.state_of(A), fleet.reason_of(A), fleet.confirmed) == ("STALE", "was restarted", None)
    bring(fleet)
    assert fleet.state_of(A) == "READY"


def test_a_restart_during_a_transfer_calls_it_off():
    fleet = a_fleet()
    publish(fleet, 0)
    transfer = begin(fleet)
    fleet.heard(A, "second", 1.0)
    assert not fleet.is_current(transfer)
    assert begin(fleet).number != transfer.number


def test_what_the_fleet_confirmed_does_not_fall_when_a_stale_server_returns():
    fleet = a_fleet(A, B)
    publish(fleet, 0)
    bring(fleet, A)
    bring(fleet, B)
    fleet.heard(B, "second", 0.0)
    publish(fleet, 1)
    returning = begin(fleet, B)
    bring(fleet, A)
    publish(fleet, 2)
    assert fleet.next_transfer(A, 0.0) is None
    fleet.confirm(returning, 0.0)
    assert (fleet.state_of(A), fleet.state_of(B), fleet.confirmed) == ("UPDATING", "UPDATING", 1)


def test_a_stale_server_that_confirms_less_than_the_fleet_has_stays_out():
    fleet = a_fleet(A, B)
    publish(fleet, 0)
    bring(fleet, A)
    bring(fleet, B)
    fleet.heard(B, "second", 0.0)
    publish(fleet, 1)
    late = begin(fleet, B)
    fleet.transferred(late)
    bring(fleet, A)
    publish(fleet, 2)
    bring(fleet, A)
    fleet.confirm(late, 0.0)
    assert (fleet.state_of(B), fleet.confirmed, fleet.is_confirmed(2)) == ("STALE", 2, False)
    bring(fleet, B)
    assert (fleet.state_of(B), fleet.confirmed, fleet.is_confirmed(2)) == ("READY", 2, True)


def test_a_silent_server_is_dead_and_stale_when_it_is_heard_again():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    assert not fleet.missed(A, 5.0)
    assert not fleet.missed(A, 9.0)
    assert fleet.missed(A, 10.5)
    assert (fleet.state_of(A), fleet.missed(A, 11.0), fleet.next_transfer(A, 11.0)) == ("DEAD", False, None)
    fleet.heard(A, "first", 12.0)
    assert fleet.state_of(A) == "STALE"
    bring(fleet, now=12.0)
    assert fleet.state_of(A) == "READY"


def test_one_probe_missed_is_not_yet_silence_however_late_it_is():
    fleet = a_fleet()
    assert not fleet.missed(A, 60.0)
    fleet.heard(A, "first", 60.1)
    assert not fleet.missed(A, 75.0)
    assert fleet.missed(A, 76.0)


def test_a_newer_incarnation_makes_every_server_stale_and_an_older_one_is_refused():
    fleet = a_fleet()
    publish(fleet, 7)
    bring(fleet)
    assert fleet.open_incarnation(2, 1)
    assert (fleet.state_of(A), fleet.confirmed, fleet.published, fleet.view().servers[0].version) == ("STALE", None, None, None)
    with pytest.raises(StaleIncarnation, match="incarnation 1 of the trainer is over, 2 has begun"):
        fleet.acquire(1, 8)
    with pytest.raises(StaleIncarnation):
        fleet.staged(1, 0, 8, 0)
    publish(fleet, 3)
    bring(fleet)
    assert (fleet.state_of(A), fleet.confirmed) == ("READY", 3)


def test_versions_grow():
    fleet = a_fleet()
    publish(fleet, 3)
    with pytest.raises(SyncError, match="versions must grow: 3 after 3"):
        fleet.acquire(1, 3)


def test_a_slot_asked_for_twice_is_given_once():
    fleet = a_fleet()
    slot = fleet.acquire(1, 3)
    assert fleet.acquire(1, 3) == slot
    fleet.staged(1, 0, 3, slot)
    with pytest.raises(SyncError, match="versions must grow"):
        fleet.acquire(1, 3)


def test_who_has_not_registered_is_told_so():
    fleet = FleetState()
    with pytest.raises(NotRegistered, match="incarnation 1 of the trainer has not registered here"):
        fleet.acquire(1, 0)


def test_a_server_that_was_never_heard_is_sent_nothing():
    fleet = FleetState()
    fleet.add(A, "", 0.0)
    fleet.open_incarnation(1, 1)
    publish(fleet, 0)
    assert fleet.next_transfer(A, 0.0) is None
    fleet.heard(A, "first", 0.0)
    assert begin(fleet).version.version == 0


# A ParameterSync that was started again


def restored(*contents: tuple[Content, ...], names: tuple[str, ...] = (A,)) -> FleetState:
    """It knows the servers, and what each rank's slots hold."""
    fleet = FleetState()
    for name in names:
        fleet.add(name, "", 0.0)
    for rank, mine in enumerate(contents):
        fleet.open_incarnation(1, len(contents))
        fleet.restore(rank, mine)
    return fleet


def say(fleet: FleetState, name: str, version: PolicyVersion | None, session: str = "first") -> None:
    fleet.heard(name, session, 0.0)
    fleet.holds(name, version)


def test_a_server_that_holds_the_current_version_is_sent_nothing():
    fleet = restored((Content(0, 6, True), Content(1, 7, True)))
    assert (fleet.published, fleet.next_transfer(A, 0.0)) == (7, None)
    say(fleet, A, PolicyVersion(1, 7))
    fleet.adopt(A, PolicyVersion(1, 7), 0.0)
    assert (fleet.state_of(A), fleet.confirmed, fleet.next_transfer(A, 0.0)) == ("READY", 7, None)


@pytest.mark.parametrize("held", [None, PolicyVersion(1, 6), PolicyVersion(1, 8), PolicyVersion(0, 7)])
def test_a_server_that_holds_anything_else_is_sent_the_current_version(held):
    fleet = restored((Content(0, 6, True), Content(1, 7, True)))
    say(fleet, A, held)
    assert held is None or not fleet.may_adopt(A, held)
    assert begin(fleet).version == PolicyVersion(1, 7)


def test_a_version_is_restored_when_every_rank_has_all_of_it():
    ahead, behind = (Content(0, 7, True), Content(1, 8, True)), (Content(0, 7, True), Content(1, 6, True))
    fleet = restored(ahead, behind)
    assert fleet.published == 7
    assert fleet.staged(1, 1, 8, 1)
    assert fleet.published == 8


@pytest.mark.parametrize("first", [0, 1])
def test_a_slot_that_one_rank_writes_holds_nothing_whoever_speaks_first(first):
    contents = [(Content(0, 9, False), Content(1, 8, True)), (Content(0, 7, True), Content(1, 8, True))]
    fleet = restored(*(contents if first == 0 else contents[::-1]))
    assert fleet.published == 8
    for rank in (0, 1):
        whole = fleet.staged(1, rank, 9, 0)
    assert whole
    assert fleet.published == 9


def test_versions_grow_past_what_was_restored():
    fleet = restored((Content(0, 9, False), Content(1, 8, True)))
    with pytest.raises(SyncError, match="versions must grow: 8 after 9"):
        fleet.acquire(1, 8)
    assert fleet.acquire(1, 9) == 0
    say(fleet, A, None)
    begin(fleet)
    assert fleet.acquire(1, 10) == 0


def test_a_rank_that_says_again_what_is_known_changes_nothing():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    slot = publish(fleet, 1)
    transfer = begin(fleet)
    seq = fleet.view().seq
    assert fleet.restore(0, [Content(slot, 1, True), Content(1 - slot, 0, True)]) == []
    assert (fleet.view().seq, fleet.is_current(transfer)) == (seq, True)


def test_an_older_incarnation_is_refused_by_what_a_server_holds():
    fleet = FleetState()
    fleet.add(A, "", 0.0)
    say(fleet, A, PolicyVersion(3, 5))
    with pytest.raises(StaleIncarnation, match="incarnation 2 of the trainer is over, 3 has begun"):
        fleet.open_incarnation(2, 1)
    assert fleet.open_incarnation(3, 1)


def test_a_server_that_says_it_holds_another_version_than_it_confirmed_takes_no_traffic():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    say(fleet, A, PolicyVersion(1, 0))
    assert fleet.state_of(A) == "READY"
    say(fleet, A, PolicyVersion(1, 1))
    assert (fleet.state_of(A), fleet.reason_of(A)) == ("STALE", "holds 1.1, and had confirmed 1.0")


def test_what_is_said_during_a_commit_counts_for_nothing():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    publish(fleet, 1)
    transfer = begin(fleet)
    say(fleet, A, None)
    assert fleet.state_of(A) == "UPDATING"
    assert fleet.confirm(transfer, 0.0)


def test_a_view_has_a_new_number_only_when_something_changed():
    fleet = a_fleet()
    seq = fleet.view().seq
    assert fleet.view().seq == seq
    fleet.heard(A, "first", 1.0)
    assert fleet.view().seq == seq
    publish(fleet, 0)
    assert fleet.view().seq == seq + 1


def test_a_publication_is_no_news_until_it_is_confirmed():
    fleet = a_fleet()
    publish(fleet, 0)
    bring(fleet)
    seq = fleet.view().seq
    publish(fleet, 1)
    assert (fleet.view().seq, fleet.has_news(seq)) == (seq + 1, False)
    bring(fleet)
    assert fleet.has_news(seq)


class FleetMachine(RuleBasedStateMachine):
    """Any order of publishing, reading, failing, restarting: a slot is always free for the trainer and never one that is read;
    what is READY holds the newest version; what the fleet confirmed falls only with a restart, a failure or an incarnation. The
    service itself may be lost at any moment: what takes traffic afterwards holds what it is said to hold."""

    @initialize(servers=st.integers(1, 3), ranks=st.integers(1, 2))
    def begin(self, servers: int, ranks: int) -> None:
        self.names = [f"inference/{i}" for i in range(servers)]
        self.ranks, self.now, self.version, self.sessions = ranks, 0.0, 0, 0
        self.fleet = a_fleet(*self.names, ranks=ranks)
        self.holds: dict[str, PolicyVersion] = {}
        self.contents: dict[int, tuple[int, int]] = {}
        self.open: list[Transfer] = []
        self.pending: list[tuple[int, int, int]] = []
        self.done_reading: set[int] = set()
        self.session_of = dict.fromkeys(self.names, "first")
        self.slots = [[None, None] for _ in range(ranks)]  # (version, whole) of each rank's slots

    def reading(self) -> list[Transfer]:
        return [t for t in self.open if self.fleet.is_current(t) and t.number not in self.done_reading]

    @rule()
    def acquire(self) -> None:
        read = {t.slot for t in self.reading()}
        slot = self.fleet.acquire(self.fleet.incarnation, self.version)
        assert slot not in read
        self.contents[slot] = (self.fleet.incarnation, self.version)
        self.pending = [(rank, self.version, slot) for rank in range(self.ranks)]
        self.slots[0][slot] = (self.version, False)
        self.version += 1

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def begin_to_write(self, data) -> None:
        rank, version, slot = data.draw(st.sampled_from(self.pending))
        self.slots[rank][slot] = (version, False)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), is_heard=st.booleans())
    def stage(self, data, is_heard: bool) -> None:
        """Where nobody hears it, the service is lost before it is said again."""
        rank, version, slot = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        self.slots[rank][slot] = (version, True)
        if not is_heard:
            self.lose_service(data)
        self.fleet.staged(self.fleet.incarnation, rank, version, slot)

    @rule(data=st.data())
    def lose_service(self, data) -> None:
        incarnation = self.fleet.incarnation
        self.fleet, self.open, self.done_reading = FleetState(silence_seconds=10), [], set()
        for name in self.names:
            self.fleet.add(name, "", self.now)
        speakers = data.draw(st.permutations([*self.names, *range(self.ranks)]))
        for speaker in speakers:
            if isinstance(speaker, str):
                self.say(speaker)
                continue
            self.fleet.open_incarnation(incarnation, self.ranks)
            mine = [Content(slot, *held) for slot, held in enumerate(self.slots[speaker]) if held is not None]
            self.fleet.restore(speaker, mine)
        self.contents = {
            slot: (incarnation, max((held[slot][0] for held in self.slots if held[slot]), default=-1)) for slot in (0, 1)
        }

    @rule(data=st.data())
    def hear(self, data) -> None:
        self.say(data.draw(st.sampled_from(self.names)))

    def say(self, name: str) -> None:
        """A STATUS: session, and what is live."""
        held = self.holds.get(name)
        self.fleet.heard(name, self.session_of[name], self.now)
        self.fleet.holds(name, held)
        if held is not None and self.fleet.may_adopt(name, held):
            self.fleet.adopt(name, held, self.now)

    @rule(data=st.data())
    def read(self, data) -> None:
        name = data.draw(st.sampled_from(self.names))
        transfer = self.fleet.next_transfer(name, self.now)
        if transfer is not None:
            assert self.contents[transfer.slot] == tuple(transfer.version)
            self.open.append(transfer)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def receive_all(self, data) -> None:
        transfer = data.draw(st.sampled_from(self.open))
        current = transfer in self.reading()
        assert not current or self.contents[transfer.slot] == tuple(transfer.version)
        self.fleet.transferred(transfer)
        self.done_reading.add(transfer.number)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["confirm", "fail", "refuse", "go live, then fail"]))
    def end(self, data, how: str) -> None:
        transfer = data.draw(st.sampled_from(self.open))
        before = self.fleet.confirmed
        if how == "refuse":
            self.fleet.refused(transfer)
            return
        self.open.remove(transfer)
        current = self.fleet.is_current(transfer)
        if how == "go live, then fail" and current:
            self.holds[transfer.server] = transfer.version
        if how != "confirm":
            self.fleet.fail(transfer, "it failed", self.now)
            return
        assert transfer.number in self.done_reading or not current or self.contents[transfer.slot] == tuple(transfer.version)
        assert self.fleet.confirm(transfer, self.now) is current
        if current:
            self.holds[transfer.server] = transfer.version
            assert before is None or (self.fleet.confirmed or 0) >= before

    @rule(data=st.data())
    def restart(self, data) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.sessions += 1
        self.session_of[name] = f"again{self.sessions}"
        self.fleet.heard(name, self.session_of[name], self.now)
        self.holds.pop(name, None)
        assert self.fleet.state_of(name) in ("STALE", "STARTING")

    @rule(data=st.data())
    def break_line(self, data) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.fleet.lost(name)
        assert self.fleet.next_transfer(name, self.now) is None

    @rule()
    def new_trainer(self) -> None:
        self.fleet.open_incarnation(self.fleet.incarnation + 1, self.ranks)
        self.contents, self.pending, self.version = {}, [], 0
        self.slots = [[None, None] for _ in range(self.ranks)]
        assert self.fleet.confirmed is None

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def who_takes_traffic_holds_a_version_of_this_incarnation(self) -> None:
        if not hasattr(self, "fleet"):
            return
        view = self.fleet.view()
        for server in view.servers:
            if server.takes_traffic:
                held = self.holds[server.name]
                assert held == PolicyVersion(self.fleet.incarnation, server.version)
                assert held.version >= view.confirmed
            if server.state == "READY":
                assert server.version == view.published
        assert len({t.slot for t in self.reading()}) <= 1


FleetMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_history_of_the_fleet = FleetMachine.TestCase
