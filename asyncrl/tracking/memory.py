"""The tracker that keeps everything in memory, for the simulator and for tests."""

from __future__ import annotations

from collections.abc import Mapping


class MemoryTracker:
    """`records`: (axis, step, metrics), in the order they were logged."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, dict[str, float]]] = []
        self.closed = False

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((axis, step, dict(metrics)))

    async def close(self) -> None:
        self.closed = True

    def names(self, axis: str) -> set[str]:
        """Every metric that this axis has seen."""
        return {name for record_axis, _, metrics in self.records if record_axis == axis for name in metrics}
