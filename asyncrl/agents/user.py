"""An agent of the user's own: ``async def agent(prompt: Prompt, session: Session)``, called once per member."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from asyncrl.agents.session import Session
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.agents.task import Agent, Task, failed_trajectory
from asyncrl.config.functions import load_function
from asyncrl.errors import GenerationFailed, UserError
from asyncrl.messages import Trajectory
from asyncrl.messages.plain import plain
from asyncrl.protocols import InferenceEngine, Prompt, Tokenizer

AgentFunction = Callable[[Prompt, Session], Awaitable[Any]]


def load_agent(
    agent: str | AgentFunction, engine: InferenceEngine, tokenizer: Tokenizer, now: Callable[[], float] = time.monotonic
) -> Agent:
    """The agent that `rollout.agent` names, or the function given in Python. Raises UserError for one that cannot be loaded."""
    if agent == "single_turn":
        return SingleTurn(engine, tokenizer, now)
    function = load_function(agent, "rollout.agent") if isinstance(agent, str) else agent
    check_agent(function)
    return UserAgent(function, engine, tokenizer, now)


def check_agent(function: Any) -> None:
    """Raises UserError unless `function` is a coroutine function of (prompt, session)."""
    call = function if inspect.isroutine(function) else type(function).__call__
    if not inspect.iscoroutinefunction(call):
        raise UserError(f"rollout.agent is {function!r}: write it as 'async def agent(prompt, session)'")


class UserAgent:
    """See `Agent`. The function runs on the rollouter's event loop and must not block it. A member whose function raises, or
    is not done by rollout.request_timeout_seconds, is a failed trajectory with the reason; what the function returns, if
    anything, is `extra_info["agent"]`, for the reward functions."""

    def __init__(
        self, function: AgentFunction, engine: InferenceEngine, tokenizer: Tokenizer, now: Callable[[], float] = time.monotonic
    ):
        self._function, self._engine, self._tokenizer, self._now = function, engine, tokenizer, now
        self.active: set[str] = set()

    async def run(self, task: Task) -> AsyncGenerator[list[Trajectory], None]:
        members = [asyncio.ensure_future(self._member(task, member)) for member in task.members]
        try:
            for finished in asyncio.as_completed(members):
                yield [await finished]
        finally:
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)

    async def _member(self, task: Task, member: int) -> Trajectory:
        session = Session(task, member, self._engine, self._tokenizer, self.active)
        began = self._now()
        work = asyncio.ensure_future(self._call(task.prompt, session))
        try:
            done, _ = await asyncio.wait({work}, timeout=task.timeout_seconds)
            if not done:
                limit = f"{task.timeout_seconds:g} s (rollout.request_timeout_seconds)"
                return failed_trajectory(task, member, f"the agent was not done after {limit}")
            result, failure = work.result()
            if failure is not None:
                return failed_trajectory(task, member, failure)
            extra_info = task.prompt.extra_info if result is None else {**task.prompt.extra_info, "agent": result}
            return session.trajectory(extra_info, self._now() - began)
        except GenerationFailed as error:
            return failed_trajectory(task, member, str(error))
        finally:
            session.close()
            work.cancel()  # one that refuses to end is left behind: its session answers no more

    async def _call(self, prompt: Prompt, session: Session) -> tuple[Any, str | None]:
        """(what the function returned, why it failed)."""
        try:
            returned = await self._function(prompt, session)
        except GenerationFailed as error:
            return None, str(error)
        except (Exception, SystemExit) as error:  # boundary: the user's agent runs here, and may raise anything
            return None, f"the agent raised {type(error).__name__}: {error}"
        try:
            return plain(returned, "result"), None
        except TypeError as error:
            return None, f"the agent's {error}: return None, text, numbers, lists or mappings keyed by text"
