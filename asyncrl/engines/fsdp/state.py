"""What a checkpoint holds of an engine: tensors by name, live or copied aside.

model.<name>                 master weights, float32, a DTensor; and the buffers that the model's files hold
optimizer.<name>.<key>       AdamW's exp_avg and exp_avg_sq (DTensors) and step (a number), once there was an update
critic.model.…, critic.optimizer.…   the same of a critic, where there is one
reference.model.…, reference.version   of a reference that is refreshed from the policy; any other is loaded again from its path
reference.coefficient        of a divergence whose coefficient adapts
rng.<rank>.<generator>       uint8: torch, cuda (where there is one), numpy, python

What is a setting (learning rate, betas, weight decay) comes from the configuration, and is not here.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError

if TYPE_CHECKING:
    from asyncrl.engines.fsdp.critic import ValueModel
    from asyncrl.engines.fsdp.model import PolicyModel

MODEL, OPTIMIZER, RNG, CRITIC, REFERENCE = "model.", "optimizer.", "rng.", "critic.", "reference."
MERSENNE_WORDS = 624
NUMPY_STATE = struct.Struct(f"<{MERSENNE_WORDS}Iqqd")
PYTHON_STATE = struct.Struct(f"<q{MERSENNE_WORDS + 1}Iqd")
Described = Mapping[str, tuple[tuple[int, ...], str]]


class Trained(NamedTuple):
    """A model with its optimizer, and what the names of its tensors begin with."""

    prefix: str
    model: PolicyModel | ValueModel
    optimizer: torch.optim.Optimizer


def live_state(trained: Iterable[Trained]) -> dict[str, torch.Tensor]:
    """Models and optimizers, the tensors themselves."""
    found: dict[str, torch.Tensor] = {}
    for each in trained:
        found |= model_state(each.prefix, each.model)
        for name, parameter in each.model.hf_named_parameters():
            for key, value in each.optimizer.state.get(parameter, {}).items():
                found[f"{each.prefix}{OPTIMIZER}{name}.{key}"] = value
    return found


def model_state(prefix: str, model: PolicyModel | ValueModel) -> Iterator[tuple[str, torch.Tensor]]:
    saved = model.model.state_dict(keep_vars=True)
    for name, parameter in model.hf_named_parameters():
        yield f"{prefix}{MODEL}{name}", parameter.detach()
    for name, buffer in model.model.named_buffers():
        if name in saved:
            yield f"{prefix}{MODEL}{name}", buffer


def make_room(trained: Sequence[Trained], described: Described) -> dict[str, torch.Tensor]:
    """The live tensors to read a checkpoint into; AdamW's, which it makes at its first update, are made where the checkpoint has
    them. Raises CheckpointError where checkpoint and model are not the same in names, shapes or dtypes."""
    for prefix, model, optimizer in trained:
        for name, parameter in model.hf_named_parameters():
            if f"{prefix}{OPTIMIZER}{name}.step" in described:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    room = {name: tensor.detach() for name, tensor in live_state(trained).items()}
    check_match(room, {name: what for name, what in described.items() if not name.startswith((RNG, REFERENCE))})
    return room


def check_match(room: Mapping[str, torch.Tensor], described: Described) -> None:
    """Raises CheckpointError naming the first difference."""
    for name in (*room, *described):
        here = (tuple(room[name].shape), str(room[name].dtype).removeprefix("torch.")) if name in room else None
        if here != described.get(name):
            raise CheckpointError(
                f"a checkpoint is of the model and the optimizer that load it; {name} is {_what(described.get(name))} there and "
                f"{_what(here)} here: set model.path to the model that the run began with, or start without this checkpoint"
            )


def _what(described: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if described is None else f"{described[1]}{list(described[0])}"


class Aside:
    """A copy of tensors in this process's own memory, pinned where they live on a GPU. The memory is kept from one copy to the
    next, so that only the first pays for it."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Independent of `tensors` when it returns; valid until the next call. A DTensor stays one."""
        on_gpu = False
        for name, tensor in tensors.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = self._kept[name] = _room_like(tensor)
            _local(kept).copy_(_local(tensor), non_blocking=True)
            on_gpu = on_gpu or tensor.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        return {name: self._kept[name] for name in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _room_like(tensor: torch.Tensor) -> torch.Tensor:
    local = _local(tensor)
    room = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
    return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room


# ---- random generators -----------------------------------------------------------------------------------------------


def generator_state(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The state of every generator of this process, under its rank's names."""
    found = {"torch": torch.get_rng_state(), "numpy": _of_bytes(_numpy_bytes()), "python": _of_bytes(_python_bytes())}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{RNG}{rank}.{name}": state for name, state in found.items()}


def generator_room(described: Described, rank: int) -> tuple[dict[str, torch.Tensor], bool]:
    """Tensors to read this rank's generators into, and whether they are its own: a rank that the saving run did not have is given
    those of another, to derive its own from."""
    ranks = sorted({int(name.split(".")[1]) for name in described if name.startswith(RNG)})
    if not ranks:
        raise CheckpointError("a checkpoint has the random generators of its ranks, and this one has none: use another one")
    source = ranks[rank % len(ranks)]
    room = {
        name: torch.zeros(shape, dtype=torch.uint8)
        for name, (shape, _) in described.items()
        if name.startswith(f"{RNG}{source}.")
    }
    return room, source == rank


def restore_generators(states: Mapping[str, torch.Tensor], device: torch.device, rank: int, *, own: bool) -> None:
    """Set this process's generators to the states that were read; a rank without its own seeds them from another's and its rank.
    A GPU that the saving run did not have is seeded too."""
    by_name = {name.split(".", 2)[2]: state for name, state in states.items()}
    if own:
        torch.set_rng_state(by_name["torch"])
        _set_numpy(by_name["numpy"])
        _set_python(by_name["python"])
        if device.type == "cuda" and "cuda" in by_name:
            torch.cuda.set_rng_state(by_name["cuda"], device)
            return
    digest = hashlib.sha256(str(rank).encode())
    for name in sorted(by_name):
        digest.update(by_name[name].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    if not own:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)
        random.seed(seed)


def _of_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _numpy_bytes() -> bytes:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    assert state["bit_generator"] == "MT19937", "NumPy's global generator is a Mersenne twister"
    inner = state["state"]
    return NUMPY_STATE.pack(*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"])


def _set_numpy(state: torch.Tensor) -> None:
    *key, position, has_gauss, gauss = NUMPY_STATE.unpack(state.numpy().tobytes())
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, gauss))


def _python_bytes() -> bytes:
    version, words, gauss = random.getstate()
    return PYTHON_STATE.pack(version, *words, gauss is not None, gauss or 0.0)


def _set_python(state: torch.Tensor) -> None:
    version, *words, has_gauss, gauss = PYTHON_STATE.unpack(state.numpy().tobytes())
    random.setstate((version, tuple(words), gauss if has_gauss else None))
