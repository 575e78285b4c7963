"""The runtime on Ray: a local instance of the run's own, or an existing cluster.

Ray places, starts, watches and stops the processes; it carries a row's specification once and its addresses and summary back,
and no sample. A local instance has a temporary folder and ports of its own, so that it works beside other runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from asyncrl.cluster import sweep
from asyncrl.cluster.builtin_model import ModelMaker
from asyncrl.cluster.host import ServiceHost, prepare_builtin_model
from asyncrl.cluster.janitor import MARK, Janitor, kill_marked
from asyncrl.cluster.spec import RunSpec
from asyncrl.data.builtin import BUILTIN_PREFIX
from asyncrl.errors import RunError
from asyncrl.services.service import AddressBook
from asyncrl.services.supervisor import Life, Row, RowFailed, rows_of
from asyncrl.transport.hosts import is_loopback
from asyncrl.transport.keys import FOLDER as KEYS_FOLDER

log = logging.getLogger(__name__)
COMPUTE = ("trainer", "inference", "teacher")

REACH_SECONDS = 5.0
OPEN_SECONDS = 60.0  # Ray's own start takes 4 s, or 30 on a machine that is busy
LEAVE_SECONDS = 20.0  # a healthy Ray ends in 1 s
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's smallest; no sample passes through it
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


class RayRuntime:
    """Implements `asyncrl.services.supervisor.Runtime`."""

    def __init__(self, spec: RunSpec):
        self._spec = spec
        self._config = spec.parsed_config()
        self._actors: dict[str, Any] = {}
        self._processes: dict[str, psutil.Process] = {}  # those of this host
        self._placed = 0
        self._folders: sweep.Folders | None = None  # where this run started a Ray of its own
        self._environment = {**WORKER_ENVIRONMENT, MARK: spec.run_id}
        self._janitor: Janitor | None = None
        self._opening: asyncio.Future[None] | None = None
        self._maker: ModelMaker | None = None

    async def open(self) -> None:
        if self._config.model.path.startswith(BUILTIN_PREFIX) and self._config.cluster.ray_address is None:
            self._maker = ModelMaker(self._config.model.path, self._environment)
        self._opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        await asyncio.shield(self._opening)

    def _open(self) -> None:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        _keep_ray_off_the_terminal()
        address = self._config.cluster.ray_address
        if ray.is_initialized():
            raise RunError("this process already has a Ray connection: one run at a time per process; call ray.shutdown() first")
        if address is not None:
            self._janitor = self._hire_janitor()
            self._join(address)
            return
        self._folders = sweep.folders_of(self._spec.run_id)
        for folder in self._folders:
            folder.mkdir(mode=0o700)
        self._environment |= _with_temporary_files_in(self._folders.scratch)
        self._janitor = self._hire_janitor(*map(str, self._folders))
        inherited = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            with _ray_on_loopback():
                ray.init(
                    address="local",
                    num_cpus=1,  # rows ask for none; this is how many idle workers Ray starts in advance
                    object_store_memory=OBJECT_STORE_BYTES,
                    namespace=self._spec.run_id,
                    _temp_dir=str(self._folders.ray),
                    **quiet,
                )
        except Exception as error:  # boundary to Ray, whose start raises errors of no common kind
            raise RunError(
                f"Ray did not start on this machine ({_first_line(error)}): see that it is not busy with something else, that "
                "/tmp and /dev/shm have room, and launch again"
            ) from error
        finally:
            _restore_environment(inherited)

    def _hire_janitor(self, *folders: str) -> Janitor:
        files, keys = sweep.shared_memory_of(self._spec.run_id), str(Path(self._spec.run_dir, KEYS_FOLDER))
        return Janitor(self._spec.run_id, files=files, folders=[*folders, keys])

    def _join(self, address: str) -> None:
        _refuse_where_nobody_listens(address)
        try:
            ray.init(
                address=address,
                namespace=self._spec.run_id,
                runtime_env={"env_vars": self._environment},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError) as error:
            raise RunError(
                f"cluster.ray_address is {address}, and no Ray cluster lets this process in there ({_first_line(error)}): "
                "see that one runs (`ray status`), and that RAY_AUTH_MODE and the token are the same here and there"
            ) from error

    async def prepare_model(self) -> None:
        if not self._config.model.path.startswith(BUILTIN_PREFIX):
            return
        if self._maker is not None:
            await asyncio.to_thread(self._maker.wait)
            return
        prepare = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(prepare_builtin_model)
        try:
            await asyncio.wrap_future(prepare.remote(self._spec).future())
        except RayError as error:
            raise RunError(f"the built-in model {self._config.model.path} could not be made: {error}") from error

    def place(self, row: Row, life: Life) -> None:
        actor = ray.remote(num_cpus=0, num_gpus=self._gpus_of(row), max_restarts=0)(ServiceHost)
        self._placed += 1  # Ray may still know the row's last actor by its name
        self._actors[row.name] = actor.options(name=f"{row.name} ({self._placed})").remote(self._spec, row, life)
        self._actors[row.name].load.remote()

    def _gpus_of(self, row: Row) -> int:
        """One GPU for each trainer rank and the teacher, and inference.tensor_parallel for each server, where there are enough,
        else none. With sync.mode broadcast ParameterSync has one too, if one is left: then NCCL carries."""
        inference = self._config.inference
        wanted = {
            r.name: inference.tensor_parallel if r.role == "inference" else 1 for r in rows_of(self._config) if r.role in COMPUTE
        }
        if inference.attach:
            wanted = {name: number for name, number in wanted.items() if not name.startswith("inference/")}
        there = ray.cluster_resources().get("GPU", 0)
        if self._config.sync.mode == "broadcast" and there > sum(wanted.values()):
            wanted["parameter_sync"] = 1
        return wanted.get(row.name, 0) if there >= sum(wanted.values()) else 0

    async def start(self, row: Row) -> dict[str, str]:
        pid, host = await self._call(row, "identify")
        if host == socket.gethostname():
            self._processes[row.name] = psutil.Process(pid)
        elif is_loopback(bind_address := self._config.cluster.bind_address):
            reason = (
                f"Ray placed it on {host}, and at cluster.bind_address {bind_address} only processes of one host hear each other"
            )
            raise RowFailed(row, f"{reason}: set cluster.bind_address to 0.0.0.0", lost=False, mistake=True)
        addresses: dict[str, str] = self._unwrap(row, await self._call(row, "start"))
        return addresses

    async def run(self, row: Row, book: AddressBook) -> Mapping[str, Any]:
        summary: Mapping[str, Any] = self._unwrap(row, await self._call(row, "run", book))
        return summary

    async def _call(self, row: Row, method: str, *args: Any) -> Any:
        reference = getattr(self._actors[row.name], method).remote(*args)
        try:
            return await asyncio.wrap_future(reference.future())
        except RayActorError as death:
            raise RowFailed(
                row, f"its process{self._pid_text(row)} ended unexpectedly ({_first_line(death)})", lost=True
            ) from death
        except RayError as error:
            raise RowFailed(row, _first_line(error), lost=False) from error

    def _pid_text(self, row: Row) -> str:
        return f" (pid {self._processes[row.name].pid})" if row.name in self._processes else ""

    @staticmethod
    def _unwrap(row: Row, answer: tuple[str, Any]) -> Any:
        outcome, value = answer
        if outcome != "ok":
            raise RowFailed(row, value, lost=False, mistake=outcome == "refused")
        return value

    async def end(self, row: Row) -> None:
        process = self._processes.pop(row.name, None)
        family = await asyncio.to_thread(sweep.Family, [process] if process is not None else [])
        if row.name in self._actors:
            ray.kill(self._actors[row.name], no_restart=True)
        await asyncio.to_thread(family.kill)

    async def close(self) -> None:
        """A stop may come while Ray is still starting; shutting it down meanwhile aborts this process, so that is waited for."""
        if self._opening is not None:
            done, _ = await asyncio.wait([self._opening], timeout=OPEN_SECONDS)
            for opening in done:
                opening.exception()  # whoever awaited `open` has it; after a cancellation nobody has
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._maker is not None:
            self._maker.close()
        family = sweep.Family(self._processes.values())
        if ray.is_initialized():
            leaving = threading.Thread(target=self._leave_ray, name="leave-ray", daemon=True)
            leaving.start()
            leaving.join(LEAVE_SECONDS)
            if leaving.is_alive():
                log.warning("Ray did not end within %.0f s: its processes are killed", LEAVE_SECONDS)
                self._kill_marked()
                leaving.join(LEAVE_SECONDS)
        family.kill()
        self._kill_marked()
        for name in sweep.remove_shared_memory(self._spec.run_id):
            log.info("removed shared memory %s", name)
        if self._folders is not None:
            sweep.remove_folders(self._folders)
        if self._janitor is not None:
            self._janitor.dismiss()

    def _kill_marked(self) -> None:
        kill_marked(self._spec.run_id, [str(self._folders.ray)] if self._folders is not None else [])

    def _leave_ray(self) -> None:
        """Returns late, or never, where Ray's own processes are gone or hang."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        ray.shutdown()


def _with_temporary_files_in(folder: Path) -> dict[str, str]:
    """Environment variables. What torch compiled stays where it is found again by the next run."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": compiled}


def _keep_ray_off_the_terminal() -> None:
    """Ray prints its own account of every dead process to standard output, where ours and a caller's JSON stand; it goes to the
    log instead. Ray has no option for it; where its internals have changed the lines are merely printed."""
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: log.warning("ray: %s", " ".join(data["lines"]))


@contextlib.contextmanager
def _ray_on_loopback() -> Iterator[None]:
    """A Ray of this run alone listens on loopback alone: it does where it takes this host for one of no cluster, which it asks a
    constant of its own (there is no option for it on Linux). Where its internals have changed, that is logged."""
    constants = ray._private.ray_constants
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
    if not is_loopback(address := ray.util.get_node_ip_address()):
        log.warning("Ray listens at %s: its own channels are only as safe as the network", address)


def _refuse_where_nobody_listens(address: str) -> None:
    """Ray itself tries for a minute and then raises an error that names no address. Raises RunError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto": Ray's to find
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise RunError(
            f"cluster.ray_address is {address}, and nobody listens there ({error.strerror or error}): start a cluster with "
            "`ray start --head`, give its address, or leave the key out to have one made for this run"
        ) from error


def _restore_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
