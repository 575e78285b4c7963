"""Where asyncrl looks into an SGLang scheduler, and what it mends there. All of SGLang that this depends on stands in this file.

| hook                                    | why                                                                                |
|-----------------------------------------|------------------------------------------------------------------------------------|
| Scheduler.__init__, after               | the model is loaded: a weight target is made of it, and whoever wants one is told  |
| Scheduler.ingest_requests, after        | no request is half-way through a step: the place for a swap                        |
| Scheduler.record_weight_version_change  | with the overlap schedule a token computed by the old weights is still on its way: |
|                                         | it belongs to the old version's span                                               |
| Req.init_next_round_input, before       | a prefix is kept under the version whose weights begin it, also for a request that |
|                                         | was sent before a swap and starts after it                                         |
| stream accumulator's accept, after      | chunks of unfinished responses say their versions too: a lost server's tokens count|

Made for SGLang 0.5.23; `install` raises where one of the places is missing.
"""

from __future__ import annotations

import dataclasses
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from asyncrl.engines.sglang.target import SchedulerTarget
from asyncrl.transport.bell import POLLIN, Bell

log = logging.getLogger(__name__)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
ACCUMULATOR = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"


def install(on_target: Callable[[SchedulerTarget, int], object], *, commit_seconds: float) -> None:
    """Register the hooks. on_target: called in each scheduler process, once its model is loaded, with the target and the
    tensor-parallel rank; what it returns lives as long as the scheduler. Raises AttributeError for an SGLang that has not what is
    hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        scheduler._asyncrl = _target_of(scheduler, commit_seconds)
        scheduler._asyncrl_kept = on_target(scheduler._asyncrl, scheduler.tp_worker.model_runner.weight_updater.tp_rank)

    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{SCHEDULER}.__init__", after_init, HookType.AFTER),
        (f"{SCHEDULER}.ingest_requests", _after_ingest, HookType.AFTER),
        (f"{SCHEDULER}.record_weight_version_change", _around_version_change, HookType.AROUND),
        (f"{REQUEST}.init_next_round_input", _before_prefill, HookType.BEFORE),
        (f"{ACCUMULATOR}.accept", _after_accept, HookType.AFTER),
    ]
    for place, hook, kind in hooks:
        pkgutil.resolve_name(place)
        HookRegistry.register(place, hook, kind)


def _target_of(scheduler: Any, commit_seconds: float) -> SchedulerTarget:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    def recompute(exchange: Callable[[], None]) -> None:
        if scheduler._engine_paused:  # by somebody else, who goes on when he likes
            exchange()
            return
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            exchange()
        finally:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    return SchedulerTarget(
        scheduler.tp_worker.model_runner.model,
        announce=lambda version: scheduler.record_weight_version_change(new_version=version),
        recompute=recompute,
        wake=_waker(scheduler),
        commit_seconds=commit_seconds,
    )


def _waker(scheduler: Any) -> Callable[[], None]:
    """What ends the sleep of an idle scheduler, which polls its sockets. One that does not sleep needs none."""
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if poller is None:
        return lambda: None
    bell = scheduler._asyncrl_bell = Bell()
    poller.register(bell.socket, POLLIN)
    return bell.ring


def _after_ingest(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    target = getattr(scheduler, "_asyncrl", None)
    if target is None:
        return
    bell = getattr(scheduler, "_asyncrl_bell", None)
    if bell is not None:
        bell.hush()
    target.between_steps()


def _around_version_change(original: Callable[..., Any], scheduler: Any, new_version: str | None = None) -> Any:
    """Requests of a batch whose result is yet to be processed get one more token of the old version, but for those in the middle
    of a long prompt."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old_version = get_serving().weight_version
    result = original(scheduler, new_version=new_version)
    if new_version is None or new_version == old_version:
        return result
    for batch, _ in getattr(scheduler, "result_queue", None) or ():
        for request in batch.reqs:
            if request.finished() or request.is_retracted or request.inflight_middle_chunks > 0:
                continue
            events, length = request.weight_version_events, len(request.output_ids)
            if length and events and events[-1] == WeightVersionEvent(old_version, length):
                events[-1] = dataclasses.replace(events[-1], num_output_tokens=length + 1)
            else:
                events.append(WeightVersionEvent(old_version, length + 1))
    return result


def _before_prefill(request: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
    """The prefix cache's name space is the version under which the request starts, or starts again."""
    if tree_cache is None:  # the next chunk of a prompt that has begun
        return
    from sglang.srt.runtime_context import get_serving

    if not hasattr(request, "_asyncrl_key"):
        request._asyncrl_key = request.extra_key or ""
    request.extra_key = f"{get_serving().weight_version}|{request._asyncrl_key}"


def _after_accept(result: Any, accumulator: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    request = kwargs["req"] if "req" in kwargs else args[0]
    versions, lengths = accumulator.weight_versions, accumulator.completion_tokens
    if versions and versions[-1] is None and len(versions) == len(lengths) and lengths[-1]:
        versions[-1] = compute_weight_version_spans(
            request.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=lengths[-1],
        )
