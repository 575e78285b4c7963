"""Messages: what crosses a process, frozen, tagged and versioned. Imports only errors.

`types` has the dataclasses, `codec` turns them into a msgpack header plus raw array frames and back.
"""

from asyncrl.messages.types import (
    FinishReason,
    GreedyResponse,
    GroupId,
    ScoredGroup,
    Trajectory,
    TrajectoryId,
)

__all__ = ["FinishReason", "GreedyResponse", "GroupId", "ScoredGroup", "Trajectory", "TrajectoryId"]
