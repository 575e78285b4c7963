"""Whenever the queue's process dies: nothing accepted is lost, nothing settled comes back, the order stays, and the law holds."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.ledger.audit import audit
from asyncrl.protocols import Dispatch, End
from asyncrl.services.message_queue import Restarted, SetBack
from asyncrl.services.message_queue.settling import ROLLOUTS, SCORED
from asyncrl.transport.journal import segments
from tests.services.message_queue.world import GROUP_SIZE, Crash, QueueWorld, config_of

SEGMENT_BYTES = 2000
counts = st.integers(1, 4)
points = st.sampled_from(["", "", "", "", "", "accepted", "written", "committed"])
states = st.sampled_from(["in_flight", "queued", "queued"])
sizes = st.sampled_from([10, 100, 900, 5000])


class Crashes(RuleBasedStateMachine):
    """`told` has, by topic, what senders were told is accepted and nobody was told is settled, in the order of acceptance; `ends`
    why and when scored groups ended that no checkpoint holds, `order` in which order scored groups were accepted."""

    durability, checkpoint_every = "process", 2

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(segments, "SEGMENT_BYTES", SEGMENT_BYTES)
        self.folder = Path(tempfile.mkdtemp(prefix="asyncrl-crash-"))
        self.runner = asyncio.Runner()
        self.told = {ROLLOUTS: [], SCORED: []}
        self.order = []
        self.ends = {}  # text id → (first step whose checkpoint holds the end, state, reissue)
        self.random = random.Random(1)
        self.incarnation = 0
        self.committed = 0  # newest checkpoint
        self.world = QueueWorld(self.folder, config_of(self.durability, self.checkpoint_every))
        self.run(self.boot())

    def teardown(self):
        self.run(self.down())
        self.runner.close()
        shutil.rmtree(self.folder)
        self.patch.undo()

    def run(self, work):
        return self.runner.run(work)

    async def boot(self, recovery=None):
        self.world.boot(recovery)

    async def down(self):
        self.world.crash()

    def live(self, *states):
        return [group.id for group in self.world.attempts.live() if group.state in states]

    def some(self, data, states, most=4):
        """Some attempts in these states; if there are few, more are dispatched first."""
        found = self.live(*states)
        if "in_flight" in states and len(found) < most:
            found += self.run(self.world.dispatch(most))
        return data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=most, unique=True)) if found else []

    @rule(size=sizes, point=points, data=st.data())
    def members_arrive(self, size, point, data):
        chosen = self.some(data, ("in_flight",)) + self.world.attempts.returned()
        members = st.lists(st.sampled_from(range(GROUP_SIZE)), min_size=1, unique=True)
        self.arrive(ROLLOUTS, [str(id.member(member)) for id in chosen for member in data.draw(members)], size, point)

    @rule(size=sizes, point=points, data=st.data())
    def scored_groups_arrive(self, size, point, data):
        self.arrive(SCORED, list(map(str, self.some(data, ("in_flight",)))), size, point)

    def arrive(self, topic, message_ids, size, crash_at):
        """Accepted in one wake-up, during which the process may die: before or after it became true, but before anybody heard."""

        async def wake_up():
            accepted = self.world.accept(topic, message_ids, size)
            if crash_at == "accepted":
                raise Crash
            if crash_at == "written":
                self.world.exchange.hooks.commit = self.die
            if crash_at == "committed":
                self.world.exchange.journal.written = self.die
            self.world.exchange.publish()
            return accepted

        try:
            accepted = self.run(wake_up())
        except Crash:
            self.restart()
            return
        self.hear(topic, accepted)

    def hear(self, topic, accepted):
        if topic == SCORED:
            self.forget_rollouts(accepted)
            self.order += accepted
        self.told[topic] += accepted

    @staticmethod
    def die():
        raise Crash

    def forget_rollouts(self, group_ids):
        self.told[ROLLOUTS] = [each for each in self.told[ROLLOUTS] if each.rsplit("/", 1)[0] not in group_ids]

    @rule(topic=st.sampled_from([ROLLOUTS, SCORED]), count=counts)
    def take(self, topic, count):
        self.run(self.async_take(topic, count))

    async def async_take(self, topic, count=1000):
        return self.world.take(topic, count)

    @rule(state=st.sampled_from(["failed", "expired", "expired"]), reissue=st.booleans(), where=states, data=st.data())
    def end(self, state, reissue, where, data):
        for id in self.some(data, (where,), most=2):
            self.run(self.world.ledger.end([End(id, state, "ended", reissue=reissue)]))
            self.ended([id], self.world.attempts.finished_steps + 1, state, reissue)

    @rule(state=st.sampled_from(["trained", "filtered"]), data=st.data())
    def step(self, state, data):
        taken = self.some(data, ("queued",))
        self.run(self.world.finish_step(taken, state))
        self.ended(taken, self.world.attempts.finished_steps, state, False)

    def ended(self, ids, step, state, reissue):
        gone = set(map(str, ids))
        self.ends.update({each: (step, state, reissue) for each in gone if each in self.told[SCORED]})
        self.forget_rollouts(gone)
        self.told[SCORED] = [each for each in self.told[SCORED] if each not in gone]

    @rule()
    def checkpoint(self):
        self.committed = self.world.attempts.finished_steps
        self.run(self.world.ledger.checkpointed(self.committed))
        self.ends = {each: end for each, end in self.ends.items() if end[0] > self.committed}

    @rule()
    def restart_returned(self):
        self.run(self.world.ledger.restart([Dispatch(id, 1) for id in self.world.attempts.returned()]))

    @rule(tail=st.sampled_from(["", "garbage", "new segment"]))
    def crash(self, tail):
        self.run(self.down())
        if tail:
            self.tear(tail)
        self.restart()

    def tear(self, how):
        """What a write that was not finished leaves behind."""
        files = sorted((self.folder / "journal").glob("*.segment"))
        path = files[-1] if files and how == "garbage" else self.folder / "journal" / "00099999.segment"
        with path.open("ab") as file:
            file.write(self.random.randbytes(self.random.randrange(1, 300)))
        if how == "new segment":
            path.rename(path.with_name(f"{int(files[-1].stem) + 1 if files else 1:08d}.segment"))

    def restart(self):
        """The process alone: everything that was accepted is offered again, in order."""
        before = self.world.attempts
        seq = before.seq
        self.run(self.down())
        report = audit(self.folder)
        assert report.ok, report.to_text()
        self.run(self.boot(Restarted()))
        assert self.world.beginning.num_lost == 0
        assert self.world.attempts.seq == seq
        self.adopt_unheard()
        self.check_everything_is_offered()

    def adopt_unheard(self):
        """What became true before the crash and nobody was told of: the sender would say it again, and hear that it is there."""
        for topic in (SCORED, ROLLOUTS):
            self.hear(topic, [each for each in self.world.unsettled(topic) if each not in self.told[topic]])

    def check_everything_is_offered(self):
        for topic in (ROLLOUTS, SCORED):
            assert self.world.unsettled(topic) == self.told[topic]
            offered = self.run(self.async_take(topic))
            again = [each for each, redelivered in offered if redelivered]
            fresh = [each for each, redelivered in offered if not redelivered]
            assert again + fresh == self.told[topic]

    @precondition(lambda self: self.durability != "none")
    @rule()
    def set_back(self):
        """The trainer goes on from the newest checkpoint: what it trained since is queued again, and delivered again."""
        self.restart()  # so that what nobody was told of is known
        self.run(self.down())
        self.world.cut_batches(self.committed)
        self.incarnation += 1
        self.run(self.boot(SetBack(self.committed, self.incarnation)))
        attempts = self.world.attempts
        assert attempts.finished_steps == self.committed
        undone = {each for each, (_, state, reissue) in self.ends.items() if state != "failed" and not reissue}
        queued = {*self.told[SCORED], *undone}
        self.ends = {each: end for each, end in self.ends.items() if each not in undone}
        self.told[SCORED] = [each for each in self.order if each in queued]
        assert sorted(str(id) for id in self.live("queued")) == sorted(queued)
        held = {each.rsplit("/", 1)[0] for each in self.told[ROLLOUTS]}
        whole = {id for id in held if sum(each.startswith(id + "/") for each in self.told[ROLLOUTS]) == GROUP_SIZE}
        assert {str(id) for id in self.live("in_flight")} <= whole
        assert not {str(id) for id in attempts.returned()} & queued
        self.check_everything_is_offered()

    @invariant()
    def the_law_holds(self):
        counts = self.world.attempts.counts()
        assert counts["dispatched"] == sum(number for term, number in counts.items() if term != "dispatched")

    @invariant()
    def the_disk_is_bounded(self):
        journal = self.world.journal
        live = sum(12 + place.size for place in journal._places.values())
        assert journal.segments.num_bytes() <= 4 * live + 8 * (SEGMENT_BYTES + 4 * 5100)


class PowerCuts(Crashes):
    durability = "power"


class WithoutCheckpoints(Crashes):
    checkpoint_every = 0

    @rule()
    def checkpoint(self):
        pass

    @rule()
    def set_back(self):
        pass


few = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestCrashes = Crashes.TestCase
TestCrashes.settings = few
TestPowerCuts = PowerCuts.TestCase
TestPowerCuts.settings = settings(max_examples=4, stateful_step_count=20, deadline=None)
TestWithoutCheckpoints = WithoutCheckpoints.TestCase
TestWithoutCheckpoints.settings = few
