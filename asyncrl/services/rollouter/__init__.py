"""The rollouter: prompts in, trajectories out, never further ahead of the trainer than the staleness bound allows."""

from asyncrl.services.rollouter.parts import RollouterParts, RpcScorer, Scorer
from asyncrl.services.rollouter.rollouter import Rollouter

__all__ = ["Rollouter", "RollouterParts", "RpcScorer", "Scorer"]
