"""Agents: single_turn, and functions of the user's own with a recorded conversation."""

import asyncio
from contextlib import aclosing
from dataclasses import fields

import numpy as np
import pytest

from asyncrl.agents import Task, UserAgent, load_agent, seed_of
from asyncrl.agents.task import seeds_of
from asyncrl.errors import GenerationFailed, TransportError, UserError
from asyncrl.messages import GroupId, Trajectory
from asyncrl.messages.codec import to_payload
from asyncrl.protocols import Completion, Prompt, SamplingParams
from asyncrl.simulation.loop import run_virtual

EOS = 9


class Echo:
    """Token ids are letters' codes; a reply is scripted by turn, each token of the version that the turn has."""

    eos_token_ids = (EOS,)

    def __init__(self, *replies, fail=lambda rid: None):
        self.replies, self.fail = replies, fail
        self.requests = []

    def encode_prompt(self, prompt):
        text = prompt if isinstance(prompt, str) else "".join(f"<{m['role']}>{m['content']}" for m in prompt) + "<assistant>"
        return [ord(letter) for letter in text]

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token != EOS)

    async def generate(self, request):
        self.requests.append(request)
        turn = len({r.prompt_tokens.tobytes() for r in self.requests}) - 1
        for member in request.members:
            await asyncio.sleep(1.0)
            reply = self.encode_prompt(self.replies[min(turn, len(self.replies) - 1)])[: request.sampling.max_new_tokens]
            failure = self.fail(member.rid)
            completion = Completion(
                index=member.index,
                token_ids=np.asarray(reply, np.int32),
                log_probs=-np.arange(len(reply), dtype=np.float32),
                versions=np.full(len(reply), 10 + turn, np.int32),
                finish_reason="failed" if failure else "stop",
                server="inference/0",
                failure=failure,
            )
            yield [completion]

    async def abort(self, rids):
        pass

    async def close(self):
        pass


def task_of(prompt="ask ", *, members=2, retries=1, room=32, timeout=60.0):
    return Task(
        id=GroupId(0, 3, 1),
        group_size=members,
        members=tuple(range(members)),
        start_version=7,
        prompt=Prompt(row=3, prompt=prompt, ground_truth="g", extra_info={"level": 2}),
        prompt_tokens=np.asarray(Echo().encode_prompt(prompt), np.int32),
        sampling=SamplingParams(max_new_tokens=16),
        max_response_tokens=room,
        run_seed=5,
        timeout_seconds=timeout,
        retries=retries,
    )


def trajectories(agent, task):
    async def collect():
        return [trajectory async for trajectories in agent.run(task) for trajectory in trajectories]

    return run_virtual(collect())


def run_agent(function, engine, **task):
    return trajectories(UserAgent(function, engine, engine), task_of(**task))


def test_single_turn_asks_for_a_group_in_one_request():
    engine = Echo("yes")
    found = trajectories(load_agent("single_turn", engine, engine), task_of(members=3))
    assert len(engine.requests) == 1
    assert [trajectory.id for trajectory in found] == [(0, 3, 1, member) for member in range(3)]
    assert {trajectory.response for trajectory in found} == {"yes"}
    assert found[0].loss_mask.all()
    assert (found[0].start_version, found[0].ground_truth, found[0].extra_info) == (7, "g", {"level": 2})


def test_single_turn_asks_again_for_the_failed_members_only():
    engine = Echo("yes", fail=lambda rid: "lost" if rid == "0/3/1/1" else None)
    found = trajectories(load_agent("single_turn", engine, engine), task_of(members=3))
    assert [len(request.members) for request in engine.requests] == [3, 1]
    assert not any(trajectory.failure for trajectory in found)
    assert engine.requests[1].members[0].seed == engine.requests[0].members[1].seed


def test_what_finishes_at_the_same_moment_comes_together_and_nothing_waits_for_the_rest():
    class Pairs(Echo):
        async def generate(self, request):
            completions = [completion async for (completion,) in super().generate(request)]
            yield completions[:2]
            await asyncio.sleep(3600.0)
            yield completions[2:]

    async def first_two():
        engine = Pairs("yes")
        async with asyncio.timeout(60.0), aclosing(load_agent("single_turn", engine, engine).run(task_of(members=4))) as finished:
            return [trajectory.id.member for trajectory in await anext(finished)]

    assert run_virtual(first_two()) == [0, 1]


def test_a_trajectory_has_every_field_and_lists_of_its_own():
    engine = Echo("yes")
    one, two = trajectories(load_agent("single_turn", engine, engine), task_of(members=2))
    assert set(vars(one)) == {field.name for field in fields(Trajectory)}
    assert one.messages is not two.messages
    assert one.tool_calls is not two.tool_calls


def test_an_engine_out_of_reach_is_a_failure_of_every_member():
    class Gone(Echo):
        async def generate(self, request):
            raise TransportError("connection refused")
            yield

    found = trajectories(load_agent("single_turn", Gone(), Gone()), task_of())
    assert [trajectory.failure for trajectory in found] == ["generation failed 2 times: TransportError: connection refused"] * 2
    assert all(len(trajectory.response_tokens) == 0 for trajectory in found)


def test_an_engine_that_forgets_a_member_is_a_failure_of_that_member():
    class Forgetful(Echo):
        async def generate(self, request):
            async for (completion,) in super().generate(request):
                if completion.index:
                    yield [completion]

    engine = Forgetful("yes")
    found = trajectories(load_agent("single_turn", engine, engine), task_of())
    assert {trajectory.id.member: trajectory.failure is None for trajectory in found} == {0: False, 1: True}


def test_a_conversation_is_recorded_with_the_environments_tokens_masked():
    async def agent(prompt, session):
        first = await session.generate(prompt.prompt)
        await session.generate(prompt.prompt + first + " no ")

    (found,) = run_agent(agent, Echo("one", "two"), members=1)
    assert "".join(map(chr, found.prompt_tokens)) == "ask "
    assert "".join(map(chr, found.response_tokens)) == "one no two"
    assert found.loss_mask.tolist() == [True] * 3 + [False] * 4 + [True] * 3
    assert found.log_probs.tolist() == [0, -1, -2, 0, 0, 0, 0, 0, -1, -2]
    assert found.versions.tolist() == [10] * 3 + [10] * 4 + [11] * 3
    assert found.response == "two"


def test_chat_messages_are_recorded_as_messages():
    async def agent(prompt, session):
        await session.generate(prompt.prompt)

    (found,) = run_agent(agent, Echo("hi"), members=1, prompt=[{"role": "user", "content": "hello"}])
    assert found.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def test_token_ids_go_to_the_server_as_they_are():
    async def agent(prompt, session):
        await session.generate([65, 66])
        await session.generate([*session.tokens, *session.encode("!")])

    engine = Echo("C", "D")
    (found,) = run_agent(agent, engine, members=1)
    assert engine.requests[1].prompt_tokens.tolist() == [65, 66, ord("C"), ord("!")]
    assert found.prompt_tokens.tolist() == [65, 66]


def test_what_the_function_returns_reaches_the_reward():
    async def agent(prompt, session):
        await session.generate(prompt.prompt)
        return {"turns": 1, "tools": ("a", "b")}

    (found,) = run_agent(agent, Echo("x"), members=1)
    assert found.extra_info == {"level": 2, "agent": {"turns": 1, "tools": ["a", "b"]}}


def test_every_member_and_turn_has_a_seed_of_its_own():
    async def agent(prompt, session):
        first = await session.generate(prompt.prompt)
        await session.generate(prompt.prompt + first + "?")

    engine = Echo("one")
    run_agent(agent, engine, members=3)
    assert len({request.members[0].seed for request in engine.requests}) == 6
    assert seeds_of(5, GroupId(0, 3, 1), (0, 1)) == [seed_of(5, 0, 3, 1, 0), seed_of(5, 0, 3, 1, 1)]
    assert seed_of(5, 0, 3, 1, 0) in {request.members[0].seed for request in engine.requests}


async def other_history(prompt, session):
    await session.generate(prompt.prompt)
    await session.generate("ask something else")


async def too_long(prompt, session):
    text = prompt.prompt
    while True:
        text += await session.generate(text) + "...."


async def raises(prompt, session):
    await session.generate(prompt.prompt)
    raise KeyError("no such tool")


async def own_timeout(prompt, session):
    await session.generate(prompt.prompt)
    raise TimeoutError("the tool hung")


async def hangs(prompt, session):
    await session.generate(prompt.prompt)
    await asyncio.Event().wait()


async def says_nothing(prompt, session):
    return 1


async def returns_an_object(prompt, session):
    await session.generate(prompt.prompt)
    return object()


async def asks_twice_at_once(prompt, session):
    await asyncio.gather(session.generate("a"), session.generate("b"))


async def exits(prompt, session):
    raise SystemExit(3)


async def refuses_to_end(prompt, session):
    while True:
        try:
            await session.generate(prompt.prompt)
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue
        except GenerationFailed as error:
            assert "over" in str(error)  # noqa: PT017
            return


async def asks_with_nothing(prompt, session):
    await session.generate([])


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (other_history, "turn 2: the prompt's tokens do not extend the conversation's, they part at token 4 of 7"),
        (too_long, "rollout.max_response_tokens is 32"),
        (raises, "the agent raised KeyError: 'no such tool'"),
        (own_timeout, "the agent raised TimeoutError: the tool hung"),
        (hangs, "not done after 60 s (rollout.request_timeout_seconds)"),
        (says_nothing, "without a call of session.generate"),
        (returns_an_object, "'result' holds a object"),
        (asks_twice_at_once, "one conversation"),
        (exits, "the agent raised SystemExit: 3"),
        (refuses_to_end, "not done after 60 s"),
        (asks_with_nothing, "turn 1: the prompt has no token"),
    ],
)
def test_an_agent_that_goes_wrong_is_a_failed_member_with_its_reason(agent, reason):
    found = run_agent(agent, Echo("one"))
    assert len(found) == 2
    for trajectory in found:
        assert reason in trajectory.failure
        assert len(trajectory.response_tokens) == 0


def test_what_an_agent_returns_becomes_what_a_message_carries():
    async def agent(prompt, session):
        await session.generate(prompt.prompt)
        return {"steps": np.int64(2), "progress": np.float64(0.5)}

    for trajectory in run_agent(agent, Echo("one")):
        assert trajectory.extra_info["agent"] == {"steps": 2, "progress": 0.5}
        assert to_payload(trajectory)


def test_one_members_failure_leaves_the_others():
    async def agent(prompt, session):
        await session.generate(prompt.prompt)
        if session.member == 1:
            raise RuntimeError("unlucky")

    found = run_agent(agent, Echo("one"), members=3)
    assert {trajectory.id.member for trajectory in found if trajectory.failure} == {1}


def test_a_failed_generation_is_tried_again_and_then_named():
    async def agent(prompt, session):
        await session.generate(prompt.prompt)

    engine = Echo("one", fail=lambda rid: "lost")
    (found,) = run_agent(agent, engine, members=1, retries=2)
    assert len(engine.requests) == 3
    assert found.failure == "turn 1: generation failed 3 times: lost"


def test_an_agent_may_handle_a_failure_itself():
    async def agent(prompt, session):
        try:
            await session.generate(prompt.prompt)
        except GenerationFailed:
            await session.generate("other ")

    engine = Echo("one", fail=lambda rid: "lost" if len(engine.requests) == 1 else None)
    (found,) = run_agent(agent, engine, members=1, retries=0)
    assert found.failure is None
    assert "".join(map(chr, found.prompt_tokens)) == "other "


def test_only_coroutine_functions_are_agents(tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def good(prompt, session): pass\n"
        "def bad(prompt, session): pass\n"
        "class Callable:\n    async def __call__(self, prompt, session): pass\n"
        "instance = Callable()\n"
    )
    engine = Echo()
    for name in ("good", "instance"):
        assert isinstance(load_agent(f"{tmp_path}/mine.py:{name}", engine, engine), UserAgent)
    with pytest.raises(UserError, match="async def agent"):
        load_agent(f"{tmp_path}/mine.py:bad", engine, engine)
    with pytest.raises(UserError, match=r"rollout\.agent"):
        load_agent("no_such_module:agent", engine, engine)
