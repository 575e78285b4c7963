"""Bringing the engine up in two moves: what needs no peers, then joining them."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from asyncrl.config.schema import Config
from asyncrl.engines.fsdp.critic import ValueModel, load_critic
from asyncrl.engines.fsdp.engine import FsdpEngine
from asyncrl.engines.fsdp.model import PolicyModel, load_policy
from asyncrl.engines.fsdp.model_files import ModelFiles
from asyncrl.engines.fsdp.process_group import RankGroup, open_meeting_point
from asyncrl.engines.fsdp.reference import load_reference
from asyncrl.engines.fsdp.saving import Saves
from asyncrl.protocols import StateFiles


class FsdpLauncher:
    """Builds one rank's engine. `model_path` is the folder or hub name with a built-in already resolved; `files` is how the
    engine's state is saved and loaded (None: it never is); `host` is where the ranks of this host are met."""

    def __init__(
        self, config: Config, *, model_path: str | Path, rank: int, host: str = "127.0.0.1", files: StateFiles | None = None
    ):
        self._saves = None if files is None else Saves(files, ModelFiles(config.model, model_path))
        self._config, self._model_path, self._rank, self._host = config, model_path, rank, host
        self._store: dist.Store | None = None
        self._policy: PolicyModel | None = None
        self._critic: ValueModel | None = None
        self._reference: PolicyModel | None = None

    def prepare(self) -> str:
        """Load the model; rank 0 of several opens the meeting point and returns its address, everyone else ""."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        transformers_logging.disable_progress_bar()
        config = self._config
        self._device = training_device(self._rank)
        self._policy = load_policy(
            config.model,
            self._model_path,
            temperature=config.rollout.temperature,
            device=self._device,
            with_weights=self._rank == 0,
        )
        if config.algorithm.advantage.needs.critic:
            self._critic = load_critic(config, self._model_path, device=self._device, with_weights=self._rank == 0)
        if config.algorithm.kl is not None:
            self._reference = load_reference(
                config, self._policy, self._model_path, device=self._device, with_weights=self._rank == 0
            )
        if self._rank or config.training.ranks == 1:
            return ""
        self._store, address = open_meeting_point(self._host, timeout_seconds=config.cluster.start_timeout_seconds)
        return address

    def join(self, meeting_point: str) -> FsdpEngine:
        """Meet the other ranks at rank 0's address and share out the model."""
        assert self._policy is not None, "prepare comes first"
        ranks = self._config.training.ranks
        if ranks == 1:
            self._store = dist.HashStore()
        elif self._rank:
            host, port = meeting_point.rsplit(":", 1)
            timeout = datetime.timedelta(seconds=self._config.cluster.start_timeout_seconds)
            self._store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        assert self._store is not None, "rank 0 opened the meeting point in prepare"
        group = RankGroup(
            rank=self._rank,
            world_size=ranks,
            store=self._store,
            device=self._device,
            timeout_seconds=self._config.training.step_timeout_seconds,
            host=self._host,
        )
        policy, critic, reference = self._policy, self._critic, self._reference
        self._policy = self._critic = self._reference = None
        return FsdpEngine(self._config, policy, group, self._device, self._saves, critic, reference)


def training_device(rank: int) -> torch.device:
    """A GPU of this rank's own where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
