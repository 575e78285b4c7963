"""Where a model's own loader puts each Hugging Face tensor.

A server keeps `q_proj`, `k_proj` and `v_proj` as rows of one parameter, and pads vocabularies. Its `load_weights` knows how, for
every architecture. So it is asked to load an empty tensor of each name, and the copies that it wants to make are noted instead of
made: each says which part of which parameter the tensor is. Nothing is moved, and no architecture need be known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.errors import PlanMismatch

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
_aten = torch.ops.aten
_PASSED_ON = {_aten._to_copy.default, _aten.clone.default}  # a loader may copy before it copies in


@dataclass(frozen=True)
class Place:
    """A tensor as a part of parameter number `parameter`: a view of its memory, in elements."""

    parameter: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The part of `memory`, which is the parameter's, or laid out like it."""
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


def places(
    load_weights: Loader, parameters: list[torch.Tensor], wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Place]:
    """The place of each wanted tensor (name to shape) in `parameters`, which `load_weights` loads into.

    Raises PlanMismatch, naming the tensor, for one that the loader does not know, loads in parts or changes on its way: such a
    server can be updated by sync.mode broadcast or disk. And for two that share elements: the shapes are another model's.
    """
    by_storage = {parameter.untyped_storage()._cdata: index for index, parameter in enumerate(parameters)}
    found = {name: _place(load_weights, parameters, by_storage, name, shape, dtype) for name, shape in wanted.items()}
    _check_disjoint(found)
    return found


def _place(
    load_weights: Loader,
    parameters: list[torch.Tensor],
    by_storage: Mapping[int, int],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Place:
    probe = torch.empty(shape, dtype=dtype)
    copies = _Copies(probe)
    try:
        with copies, torch.no_grad():
            load_weights([(name, probe)])
    except Exception as error:  # boundary: a foreign model's loader, which may dislike a lone tensor in any way
        raise PlanMismatch(
            f"{name}: the server's loader does not take it ({type(error).__name__}: {error}): use sync.mode disk"
        ) from error
    if not copies.seen and not copies.are_partial:
        raise PlanMismatch(f"{name}: the server's model has no such parameter: serve the model that is trained")
    target = copies.seen[0] if copies.seen else probe
    index = by_storage.get(target.untyped_storage()._cdata)
    is_in_parts = copies.are_partial or len(copies.seen) > 1
    if is_in_parts or index is None or _without_ones(target.shape) != _without_ones(shape):
        raise PlanMismatch(
            f"{name}: the server keeps it {'in parts' if is_in_parts else 'in another form'}, so that shards have no place of "
            "their own there: use sync.mode broadcast or disk, or one device a server"
        )
    strides = dict(enumerate(stride for size, stride in zip(target.shape, target.stride(), strict=True) if size != 1))
    fitted, kept = [], 0
    for size in shape:
        fitted.append(1 if size == 1 else strides[kept])
        kept += size != 1
    return Place(index, tuple(shape), tuple(fitted), target.storage_offset() - parameters[index].storage_offset())


def _check_disjoint(found: Mapping[str, Place]) -> None:
    """Of places that are one run of memory each, which fused ones are."""
    ends: dict[int, tuple[int, str]] = {}
    runs = [(place.parameter, place.offset, place, name) for name, place in found.items() if place.is_contiguous]
    for parameter, offset, place, name in sorted(runs, key=lambda run: run[:2]):
        end, before = ends.get(parameter, (0, ""))
        if offset < end:
            raise PlanMismatch(f"{name}: shares elements with {before} in the server's model: serve the model that is trained")
        ends[parameter] = offset + math.prod(place.size), name


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


class _Copies(TorchDispatchMode):
    """Notes the targets of copies from the whole of `probe`, and keeps them from happening. In this thread alone."""

    def __init__(self, probe: torch.Tensor):
        super().__init__()
        self._sources = {probe.untyped_storage()._cdata: probe}  # storages that hold all of the probe; alive, so that ids stay
        self._elements = probe.numel()
        self.seen: list[torch.Tensor] = []
        self.are_partial = False  # parts of the probe were copied by themselves

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.copy_.default and args[1].untyped_storage()._cdata in self._sources:
            if self._is_whole(args[1]):
                self.seen.append(args[0])
            else:
                self.are_partial = True
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in _PASSED_ON and self._is_whole(args[0]) and result.is_contiguous():
            self._sources[result.untyped_storage()._cdata] = result
        return result

    def _is_whole(self, source: torch.Tensor) -> bool:
        """Whether it is all of the probe, in the probe's order."""
        known = self._sources.get(source.untyped_storage()._cdata)
        return known is not None and source.numel() == self._elements and source.is_contiguous()
