"""Agents: how the members of a group become trajectories. Imports protocols, messages, config, errors.

`single_turn` asks for one response per member, a whole group in one request. `user` runs a function of the user's own per
member, which talks to the policy through a `Session`.
"""

from asyncrl.agents.session import Session
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.agents.task import Agent, Task, seed_of
from asyncrl.agents.user import UserAgent, load_agent

__all__ = ["Agent", "Session", "SingleTurn", "Task", "UserAgent", "load_agent", "seed_of"]
