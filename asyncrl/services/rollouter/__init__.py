"""The rollouter: prompts in, trajectories out, never further ahead of the trainer than the staleness bound allows."""

from asyncrl.services.rollouter.parts import RollouterParts
from asyncrl.services.rollouter.rollouter import Rollouter
from asyncrl.services.rollouter.scorer import RpcScorer, Scorer

__all__ = ["Rollouter", "RollouterParts", "RpcScorer", "Scorer"]
