"""A small model that keeps its parameters as SGLang does: fused, padded, loaded by Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

HIDDEN, HEADS, KV_ROWS, INTER, VOCABULARY, PADDED = 8, 8, 4, 12, 13, 16


class FusedParameter(nn.Parameter):
    """With a loader of its own, as SGLang's parameter classes have."""


def _loading(shape: tuple[int, ...], loader) -> FusedParameter:
    parameter = FusedParameter(torch.zeros(shape), requires_grad=False)
    parameter.weight_loader = loader
    return parameter


def _rows(parameter: nn.Parameter, loaded: torch.Tensor, start: int) -> None:
    parameter.data.narrow(0, start, loaded.shape[0]).copy_(loaded)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        starts = {"q": 0, "k": HEADS, "v": HEADS + KV_ROWS}
        self.qkv_proj = _loading((HEADS + 2 * KV_ROWS, HIDDEN), lambda p, x, part: _rows(p, x, starts[part]))
        self.gate_up_proj = _loading((2 * INTER, HIDDEN), lambda p, x, part: _rows(p, x, INTER * part))
        self.norm = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)


class FusedModel(nn.Module):
    """Loads embed.weight (padded), q/k/v/gate/up of each layer (fused) and norm.weight (as it is, through a copy of its own)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _loading((PADDED, HIDDEN), lambda p, x: p.data[: x.shape[0]].copy_(x))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = self.embed  # tied

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "embed.weight":
                self.embed.weight_loader(self.embed, loaded)
                continue
            _, index, what = name.split(".", 2)
            layer = self.layers[int(index)]
            match what:
                case "norm.weight":
                    layer.norm.data.copy_(loaded.to(torch.float32).clone())
                case "q" | "k" | "v":
                    layer.qkv_proj.weight_loader(layer.qkv_proj, loaded, what)
                case "gate" | "up":
                    layer.gate_up_proj.weight_loader(layer.gate_up_proj, loaded, int(what == "up"))


def hugging_face_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, HIDDEN)}
    for index in range(2):
        rows = {"q": HEADS, "k": KV_ROWS, "v": KV_ROWS, "gate": INTER, "up": INTER}
        shapes |= {f"layers.{index}.{part}": (number, HIDDEN) for part, number in rows.items()}
        shapes[f"layers.{index}.norm.weight"] = (HIDDEN,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shapes_of(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
