"""What the public calls are given, held against its rule: the shape, the kind, the mask. Raises UserError."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncrl.errors import UserError


def as_mask(mask: Any) -> torch.Tensor:
    """The mask as bool [B, T], from bool or 0/1 of any dtype."""
    mask = _tensor("mask", mask)
    if mask.dim() != 2:
        raise UserError(f"mask has shape {tuple(mask.shape)}, but must be [B, T]: a row for each response, right-padded")
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UserError("mask holds a value that is neither 0 nor 1: give 1 for trainable tokens, 0 for all others")
    return mask != 0


def floating(name: str, values: Any) -> torch.Tensor:
    """A floating tensor, half precisions widened to float32."""
    values = _tensor(name, values)
    if not values.is_floating_point():
        raise UserError(f"{name} has dtype {_name(values.dtype)}, but must be floating: give {name}.float()")
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def whole(name: str, values: Any, mask_BT: torch.Tensor | None = None) -> torch.Tensor:
    """An int64 tensor, from any integer dtype; ids also from a list or an array. mask_BT: where it is False the value is free,
    and becomes 0."""
    values = _tensor(name, torch.as_tensor(values) if isinstance(values, list | tuple | np.ndarray) else values)
    if values.is_floating_point() or values.dtype == torch.bool or values.is_complex():
        raise UserError(f"{name} has dtype {_name(values.dtype)}, but must be whole numbers: give {name}.long()")
    values = values.to(torch.int64)
    if mask_BT is not None and values.shape == mask_BT.shape:
        values = torch.where(mask_BT, values, torch.zeros_like(values))
    return values


def shaped(name: str, values: torch.Tensor, shape: tuple[int, ...], meaning: str) -> torch.Tensor:
    if tuple(values.shape) != shape:
        raise UserError(f"{name} has shape {tuple(values.shape)}, but must have {shape}, {meaning}")
    return values


def same_shape(name: str, values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return shaped(name, values, tuple(mask_BT.shape), "that of mask: one for each token")


def _tensor(name: str, values: Any) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        raise UserError(f"{name} is a {type(values).__name__}, but must be a tensor: give torch.as_tensor({name})")
    return values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
