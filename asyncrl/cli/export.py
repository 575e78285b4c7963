"""`export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from asyncrl.checkpoint import CheckpointInfo, Checkpoints, read_checkpoint
from asyncrl.checkpoint.folders import STATE_FILE
from asyncrl.cli.words import count, print_json, size
from asyncrl.errors import UserError


def export(source: Path, to: Path, *, dtype: str | None, test: bool, trust_remote_code: bool, as_json: bool) -> int:
    """source: a run directory, whose newest complete checkpoint is taken, or a checkpoint."""
    checkpoint = find_checkpoint(source)
    from asyncrl.checkpoint.export import export_model

    done = export_model(checkpoint, to, dtype=dtype, test=test, trust_remote_code=trust_remote_code)
    if as_json:
        print_json(
            {
                "ok": True,
                "folder": str(done.folder),
                "checkpoint": str(checkpoint.folder),
                "step": done.step,
                "version": done.version,
                "dtype": done.dtype,
                "parameters": done.parameters,
                "bytes": done.bytes,
                "compared_logits": done.compared_logits,
            }
        )
        return 0
    print(
        f"{done.folder}: step {done.step}, version {done.version}, {count(done.parameters)} parameters in {done.dtype}, "
        f"{size(done.bytes)}"
    )
    if done.compared_logits is not None:
        print(f"transformers loads it; its weights and {count(done.compared_logits)} logits equal the checkpoint's, bit for bit")
    return 0


def find_checkpoint(source: Path) -> CheckpointInfo:
    """Raises UserError where there is none to be found, CheckpointError for one that is damaged."""
    if not source.is_dir():
        raise UserError(f"there is no folder {source}: give a run directory, or a checkpoint such as RUN/checkpoints/step_000120")
    if (source / STATE_FILE).is_file():
        return read_checkpoint(source)
    newest = Checkpoints(source).newest_complete()
    if newest is None:
        raise UserError(
            f"{source} is no checkpoint and has no complete one: give a run whose checkpoint.every was above 0, or a checkpoint"
        )
    return newest
