"""A second memory for a model's parameters, behind the same module tree.

SGLang fuses, pads and slices parameters while it loads them. A shadow lets that happen while the model itself decodes: modules
and parameters are new objects with the attributes of the old (loaders hang on them), and everything else is shared.
"""

from __future__ import annotations

from typing import Any

import torch


class Shadow:
    """`model`: loads like the original, into memory of its own. `pairs`: (live, shadow) of every parameter."""

    def __init__(self, original: torch.nn.Module):
        parameters = {id(parameter): _like(parameter) for parameter in original.parameters()}
        self.model = _clone(original, parameters, {})
        self.pairs = [(parameter, parameters[id(parameter)]) for parameter in original.parameters()]


def _like(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Of the same class, with the same attributes and, in memory of its own, the same values: what no loader writes (padding)
    stays as it was."""
    copy = torch.Tensor._make_subclass(type(parameter), parameter.data.clone(), False)
    copy.__dict__.update(parameter.__dict__)
    return copy


def _clone(
    module: torch.nn.Module, parameters: dict[int, torch.nn.Parameter], known: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    if id(module) in known:
        return known[id(module)]
    copy = known[id(module)] = object.__new__(type(module))
    state: dict[str, Any] = dict(module.__dict__)
    state["_parameters"] = {
        name: None if parameter is None else parameters[id(parameter)] for name, parameter in module._parameters.items()
    }
    state["_modules"] = {
        name: None if child is None else _clone(child, parameters, known) for name, child in module._modules.items()
    }
    copy.__dict__.update(state)
    return copy
