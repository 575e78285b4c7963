"""Checkpoints: complete or absent, the newest and the best of them kept, readable on any number of ranks.

    begin ─▶ .step_000120.writing/ ─ every rank writes its shards ─▶ commit: state.json, fsync, rename ─▶ step_000120/ ─▶ prune
                                                                  └▶ abandon: it is removed

    folders    Checkpoints: names, commit, what is kept; no torch
    durable    bytes on their way to the disk, and errors of the operating system in words
    dcp        DcpFiles: named tensors in a folder (torch.distributed.checkpoint), written by all ranks or one, read by any number
    metadata   DCP's `.metadata`, read without running anything that it names
    export     a checkpoint as a Hugging Face folder

A checkpoint holds `.metadata` and `__<rank>_<n>.distcp` (DCP: tensors only), `state.json` (`folders` has its format) and
`model/` (configuration and tokenizer in Hugging Face's files, for `export`).

Imports protocols, config, errors. `dcp`, `metadata` and `export` load torch; what is named here does not.
"""

from asyncrl.checkpoint.folders import CheckpointInfo, Checkpoints, read_checkpoint

__all__ = ["CheckpointInfo", "Checkpoints", "read_checkpoint"]
