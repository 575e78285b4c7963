"""The rows that every other one talks to: message_queue and parameter_sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cluster.assembly.common import CLOCK, model_folder
from asyncrl.cluster.spec import RunSpec
from asyncrl.services.service import Service
from asyncrl.services.supervisor import Life, Row
from asyncrl.transport import security

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.services.message_queue.recovery import Recovery
    from asyncrl.services.parameter_sync.service import Channel


def message_queue(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.services.message_queue import MessageQueueService

    return MessageQueueService(spec.parsed_config(), Path(spec.run_dir), clock=CLOCK, recovery=_recovery(life))


def _recovery(life: Life) -> Recovery:
    from asyncrl.messages import GroupId
    from asyncrl.services.message_queue.recovery import Fresh, Restarted, SetBack

    if life.set_back_to is not None:
        return SetBack(life.set_back_to, life.incarnation)
    if life.first:
        return Fresh(life.incarnation)
    return Restarted(frozenset(map(GroupId.parse, life.held or ())))


def parameter_sync(spec: RunSpec, row: Row, life: Life) -> Service:
    from asyncrl.services.parameter_sync.service import ParameterSyncService, SyncSettings
    from asyncrl.weight_sync.plan import bucket_bytes

    config = spec.parsed_config()
    sync = config.sync
    throttle = sync.max_megabytes_per_second
    settings = SyncSettings(
        transport=sync.transport,
        kv_policy=sync.kv_policy,
        verify=sync.verify,
        verify_every=sync.verify_every,
        bucket_bytes=bucket_bytes(sync.bucket_megabytes, throttle),
        bytes_per_second=throttle * 1e6 if throttle is not None else None,
        timeout_seconds=sync.timeout_seconds,
        silence_seconds=sync.silence_seconds,
    )
    return ParameterSyncService(settings, connect=_line(spec, config), clock=CLOCK, record=Path(spec.run_dir) / "sync.jsonl")


def _line(spec: RunSpec, config: Config) -> Callable[[str, str, str], Channel]:
    """What carries versions to a server, by sync.mode."""
    from asyncrl.weight_sync.channel import ReceiverChannel, staged_line

    if config.sync.mode == "staged":
        return staged_line
    from asyncrl.weight_sync.endpoints import UpdateEndpoints
    from asyncrl.weight_sync.http_channel import Carrier, DiskCarrier, HttpChannel

    def line(name: str, http: str, weights: str) -> HttpChannel:
        endpoints = UpdateEndpoints(http, token=security.door().token, timeout_seconds=config.sync.timeout_seconds)
        carrier: Carrier
        if config.sync.mode == "disk":
            folder = Path(config.sync.folder or spec.run_dir) / "versions" / name.replace("/", "-")
            carrier = DiskCarrier(endpoints, folder, Path(model_folder(config.model.path)))
        else:
            from asyncrl.weight_sync.broadcast import BroadcastCarrier

            carrier = BroadcastCarrier(
                endpoints,
                tensor_parallel=config.inference.tensor_parallel,
                timeout_seconds=config.sync.timeout_seconds,
            )
        return HttpChannel(endpoints, carrier, ReceiverChannel(weights) if weights else None)

    return line
