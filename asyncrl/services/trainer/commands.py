"""What rank 0 tells the others: one command per broadcast, msgpack with the groups as the message codec writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from asyncrl.errors import MalformedFrame
from asyncrl.messages import ScoredGroup
from asyncrl.messages.codec import from_payload, to_payload
from asyncrl.protocols import TrainBatch


@dataclass(frozen=True)
class Tick:
    """Nothing to do; so that no rank waits long in one collective."""


@dataclass(frozen=True)
class Train:
    batch: TrainBatch


@dataclass(frozen=True)
class Judge:
    """Compute log-probs of this batch, and train nothing."""

    batch: TrainBatch
    temperature: float
    rounded: bool


@dataclass(frozen=True)
class Publish:
    version: int
    slot: int


@dataclass(frozen=True)
class Save:
    """Copy aside and begin to write into this folder."""

    folder: str


@dataclass(frozen=True)
class FinishSave:
    """Wait up to `timeout` seconds for what Save began, and agree how it went."""

    timeout: float


@dataclass(frozen=True)
class Load:
    """Take the state that lies in this folder."""

    folder: str


@dataclass(frozen=True)
class Stop:
    """The last command. `reason` is "" for a regular end."""

    reason: str = ""


Command = Tick | Train | Judge | Publish | Save | FinishSave | Load | Stop


def encode_command(command: Command) -> bytes:
    match command:
        case Tick():
            body: list[Any] = ["tick"]
        case Publish(version, slot):
            body = ["publish", version, slot]
        case Save(folder):
            body = ["save", folder]
        case FinishSave(timeout):
            body = ["finish_save", timeout]
        case Load(folder):
            body = ["load", folder]
        case Stop(reason):
            body = ["stop", reason]
        case Train(batch):
            body = ["train", *_batch_to_wire(batch)]
        case Judge(batch, temperature, rounded):
            body = ["judge", temperature, rounded, *_batch_to_wire(batch)]
    packed: bytes = msgpack.packb(body)
    return packed


def decode_command(payload: bytes) -> Command:
    """Raises MalformedFrame for a payload that is no command."""
    match msgpack.unpackb(payload):
        case ["tick"]:
            return Tick()
        case ["publish", int(version), int(slot)]:
            return Publish(version, slot)
        case ["save", str(folder)]:
            return Save(folder)
        case ["finish_save", float(timeout)]:
            return FinishSave(timeout)
        case ["load", str(folder)]:
            return Load(folder)
        case ["stop", str(reason)]:
            return Stop(reason)
        case ["train", *batch]:
            return Train(_batch_from_wire(batch))
        case ["judge", float(temperature), bool(rounded), *batch]:
            return Judge(_batch_from_wire(batch), temperature, rounded)
        case other:
            raise MalformedFrame(f"no trainer command: {other!r:.80}")


def _batch_to_wire(batch: TrainBatch) -> list[Any]:
    groups, cuts = [to_payload(group) for group in batch.groups], [list(cut) for cut in batch.mini_batches]
    return [batch.step, batch.version, batch.learning_rate, groups, cuts, batch.epochs]


def _batch_from_wire(wire: list[Any]) -> TrainBatch:
    match wire:
        case [int(step), int(version), float(learning_rate), list(groups), list(cuts), int(epochs)]:
            whole = tuple(_group(group) for group in groups)
            return TrainBatch(step, version, learning_rate, whole, tuple(tuple(cut) for cut in cuts), epochs)
        case other:
            raise MalformedFrame(f"no batch: {other!r:.80}")


def _group(payload: bytes) -> ScoredGroup:
    group = from_payload(payload)
    if not isinstance(group, ScoredGroup):
        raise MalformedFrame(f"a batch holds scored groups, found {type(group).__name__}")
    return group
