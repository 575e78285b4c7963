"""A server's stand-in: named tensors, and a commit that exchanges them at once."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from asyncrl.protocols.weights import CommitReport, KvPolicy, PolicyVersion


class StandInTarget:
    """protocols.WeightTarget over a dict of tensors. `gate` closed holds commits back, as a long decode step would."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.commits: list[PolicyVersion] = []
        self.gate = threading.Event()
        self.gate.set()

    def live(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def commit(self, staged: Mapping[str, torch.Tensor], version: PolicyVersion, kv_policy: KvPolicy) -> CommitReport:
        assert self.gate.wait(30)
        for name, tensor in staged.items():
            live = self._live[name]
            live.data, tensor.data = tensor.data, live.data
        self.commits.append(version)
        return CommitReport(pause_seconds=0.001)


def a_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A few named tensors, one of them large."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (50, 8), "layer.weight": (8, 8), "layer.bias": (8,), "norm.weight": (8,), "scale": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
