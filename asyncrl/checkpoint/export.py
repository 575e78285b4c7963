"""A checkpoint as a Hugging Face folder: safetensors, configuration, generation configuration, tokenizer.

    <checkpoint>/model/ ─ configuration ─▶ an empty model ─ weights from DCP, float32 ─▶ cast ─▶ .<name>.writing/ ─▶ <name>/

One process, no process group, whatever number of ranks wrote the checkpoint. Weights are the trainer's, cast once; a tied tensor
lies in the files once. The folder is complete or absent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from asyncrl.checkpoint.dcp import DcpFiles
from asyncrl.checkpoint.durable import in_words, sync, sync_tree
from asyncrl.checkpoint.folders import CheckpointInfo
from asyncrl.errors import CheckpointError, UserError

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL = "model."
WEIGHTS = "*.safetensors"
PROBE_TOKENS = 32
EXPORTING = "an export is written"


@dataclass(frozen=True)
class Export:
    """What was written. compared_logits: how many were found equal, bit for bit, by the test; None without it."""

    folder: Path
    step: int
    version: int
    dtype: str
    parameters: int
    bytes: int
    compared_logits: int | None


def export_model(
    checkpoint: CheckpointInfo, to: Path, *, dtype: str | None = None, test: bool = False, trust_remote_code: bool = False
) -> Export:
    """Write `checkpoint` to the folder `to`, which must be new or empty; dtype: None is the model.dtype of its run.

    test: load what was written with transformers, and hold weights and logits against the checkpoint's, bit for bit.
    trust_remote_code: run the code that the model of the checkpoint comes with. That its run did is no leave to: the checkpoint
    may be another's.

    Raises UserError for a target that is taken or a dtype that is none, CheckpointError for a checkpoint that cannot be read, a
    disk that refuses, or a test that fails; `to` is as it was then.
    """
    dtype, to = dtype or _of_model(checkpoint, "dtype"), to.expanduser().absolute()
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype}, but must be {', '.join(DTYPES)}")
    _refuse_taken(to)
    if _of_model(checkpoint, "trust_remote_code") and not trust_remote_code:
        raise UserError(
            f"the model of {checkpoint.folder} comes with code of its own (model.trust_remote_code), which an export runs: add "
            "--trust-remote-code where you trust its author"
        )
    with _quiet():
        model = _read_model(checkpoint, trust_remote_code=trust_remote_code)
        _cast(model, dict.fromkeys(dict(model.named_parameters()), DTYPES[dtype]))
        aside = to.with_name(f".{to.name}.writing")
        try:
            _write(model, checkpoint.folder / "model", aside)
            compared = _test(model, aside, checkpoint, DTYPES[dtype], trust_remote_code=trust_remote_code) if test else None
            sync_tree(aside)
            aside.replace(to)
            sync(to.parent)
        except OSError as error:
            raise in_words(error, EXPORTING, to) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return Export(
        folder=to,
        step=checkpoint.step,
        version=checkpoint.version,
        dtype=dtype,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=sum(file.stat().st_size for file in to.glob(WEIGHTS)),
        compared_logits=compared,
    )


def _of_model(checkpoint: CheckpointInfo, name: str) -> Any:
    """What the run's configuration says of its model. Raises CheckpointError."""
    model = checkpoint.state["config"].get("model")
    if not isinstance(model, dict) or name not in model:
        raise CheckpointError(
            f"a checkpoint holds the configuration of its run, and {checkpoint.folder} has no model.{name}: use another one"
        )
    return model[name]


def _refuse_taken(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to is {to}, which is there already and not an empty folder: name a new one, or remove it first")
    if not to.parent.is_dir():
        raise UserError(f"--to is {to}, and there is no folder {to.parent}: make it first")


@torch.no_grad()
def _read_model(checkpoint: CheckpointInfo, *, trust_remote_code: bool) -> Any:
    """The model with the checkpoint's master weights, float32, in evaluation mode."""
    config = AutoConfig.from_pretrained(checkpoint.folder / "model", trust_remote_code=trust_remote_code)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.tie_weights()
    files = DcpFiles()
    described = files.describe(str(checkpoint.folder))
    whole = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name.removeprefix(MODEL) for name in described if name.startswith(MODEL)]
    for name, _ in model.named_parameters():
        if described.get(f"{MODEL}{name}", (None,))[0] != tuple(whole[name].shape):
            raise CheckpointError(
                f"a checkpoint holds every weight of its model, and {checkpoint.folder} has no {name} of shape "
                f"{list(whole[name].shape)}: use another checkpoint"
            )
    if strange := [name for name in names if name not in whole]:
        raise CheckpointError(
            f"a checkpoint holds the weights of its model alone, and {checkpoint.folder} has {strange[0]}, which its "
            "configuration does not know: use another checkpoint"
        )
    files.read(str(checkpoint.folder), {f"{MODEL}{name}": whole[name].detach() for name in names})
    return model.eval()


def _cast(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Parameters alone: buffers such as rotary frequencies keep the precision that transformers gives them."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _write(model: Any, beside: Path, aside: Path) -> None:
    """Everything into `aside`: weights and configuration by transformers, the other files as the checkpoint has them."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    model.save_pretrained(aside)
    for file in sorted(beside.rglob("*")):
        if file.is_file() and file.relative_to(beside).as_posix() != "config.json":
            place = aside / file.relative_to(beside)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


@torch.no_grad()
def _test(model: Any, folder: Path, checkpoint: CheckpointInfo, dtype: torch.dtype, *, trust_remote_code: bool) -> int:
    """Raises CheckpointError at the first difference; the number of logits compared."""
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    master = dict(_read_model(checkpoint, trust_remote_code=trust_remote_code).named_parameters())
    for name, parameter in read.named_parameters():
        if name not in master or not torch.equal(parameter.to(dtype), master[name].to(dtype)):
            raise CheckpointError(f"an export equals its checkpoint, and {name} does not: keep the checkpoint, and report this")
    _cast(model, {name: parameter.dtype for name, parameter in read.named_parameters()})  # some models keep a few in float32
    text = model.config.get_text_config()
    length = min(PROBE_TOKENS, getattr(text, "max_position_embeddings", None) or PROBE_TOKENS)
    tokens = (torch.arange(length) * 7919 % text.vocab_size)[None]
    mine, theirs = (each(input_ids=tokens, use_cache=False).logits for each in (model, read))
    if not torch.equal(mine, theirs):
        raise CheckpointError("an export answers as its checkpoint does, and does not: keep the checkpoint, and report this")
    return mine.numel()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers' on standard error."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
