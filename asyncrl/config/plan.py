"""What a launch would start, without starting it: processes, devices, ports, sizes, an estimate of the memory. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.checks import advice, longest_sequence
from asyncrl.config.facts import Facts, ModelFacts
from asyncrl.config.schema import Config

MB = 1_000_000
PLAIN_PROCESS = 120 * MB
"""A process of Python, Ray's worker and the messages' libraries, without torch."""
TORCH_PROCESS = 420 * MB
SGLANG_PROCESSES = 1900 * MB
RAY_ITSELF = 450 * MB
ACTIVATIONS_PER_LAYER = 16
"""Values kept for the backward pass, per token and layer, in units of the hidden size."""


@dataclass(frozen=True)
class PlannedProcess:
    """memory_bytes: an estimate; None where the model's size is not known."""

    name: str
    work: str
    device: str
    ports: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """The resolved plan. `staleness`: the bound, in words; `sizes`: what a step and the run amount to; `notes`: what is allowed
    and may surprise."""

    name: str
    processes: tuple[PlannedProcess, ...]
    memory_bytes: int | None
    machine: dict[str, int | None]
    model: dict[str, Any]
    data: dict[str, Any]
    staleness: str
    sizes: dict[str, int | None]
    notes: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: Config, facts: Facts) -> Plan:
    processes = _processes(config, facts)
    known = [process.memory_bytes for process in processes]
    total = None if None in known else sum(bytes_ for bytes_ in known if bytes_ is not None) + RAY_ITSELF
    notes = advice(config, facts)
    if total is not None and facts.memory_bytes is not None and total > facts.memory_bytes:
        notes.append(
            f"the estimate, {total / 1e9:.1f} GB, is more than this machine's {facts.memory_bytes / 1e9:.1f} GB of memory"
        )
    model = facts.model or ModelFacts()
    return Plan(
        name=config.name,
        processes=tuple(processes),
        memory_bytes=total,
        machine={"cores": facts.cores, "memory_bytes": facts.memory_bytes, "gpus": facts.gpus},
        model={"path": config.model.path, "dtype": config.model.dtype, **asdict(model)},
        data={
            "train": config.data.train,
            "train_rows": facts.train.rows if facts.train else None,
            "eval": config.data.eval,
            "eval_rows": facts.eval.rows if facts.eval else None,
        },
        staleness=_staleness(config),
        sizes=_sizes(config, facts),
        notes=tuple(notes),
    )


def _staleness(config: Config) -> str:
    rollout, training = config.rollout, config.training
    preset = [f"preset {rollout.preset}"] if rollout.preset else []
    if rollout.staleness_limit == 0:
        return ", ".join(["on-policy", *preset])
    limit = rollout.staleness_limit
    bound = "at most 1 version" if limit == 1 else f"at most {limit} versions"
    if rollout.max_staleness == "auto":
        bound = f"auto, {rollout.staleness_floor} to {limit} versions"
    pace = [f"a new one every {training.publish_every} steps"] if training.publish_every > 1 else []
    return ", ".join([bound, *pace, f"on_stale {rollout.on_stale}", *preset])


def _sizes(config: Config, facts: Facts) -> dict[str, int | None]:
    rollout, training = config.rollout, config.training
    responses = training.groups_per_step * rollout.group_size
    rows = facts.train.rows if facts.train else None
    groups = training.steps * training.groups_per_step
    if rows is not None and config.data.epochs is not None:
        groups = min(groups, rows * config.data.epochs)
    return {
        "steps": training.steps,
        "groups_per_step": training.groups_per_step,
        "responses_per_step": responses,
        "most_tokens_per_step": responses * (rollout.max_prompt_tokens + rollout.max_response_tokens),
        "updates_per_step": training.mini_batches * training.epochs_per_batch,
        "groups": groups,
        "versions": training.steps // training.publish_every,
        "live_groups": (1 + rollout.staleness_limit) * training.publish_every * training.groups_per_step,
        "context_tokens": _context(config),
        "queue_items_per_topic": config.queue.capacity,
        "queue_bytes_per_topic": int(config.queue.capacity_megabytes * MB),
    }


def _processes(config: Config, facts: Facts) -> list[PlannedProcess]:
    """In the order of `asyncrl status`. Each rank and each server has a GPU of its own, or none has one."""
    ranks, servers, shared = config.training.ranks, config.inference.servers, config.inference.tensor_parallel
    has_gpus = facts.gpus >= ranks + servers * shared + config.algorithm.serves_teacher
    devices = [f"cuda:{rank}" if has_gpus else "cpu" for rank in range(ranks)]
    for first in range(ranks, ranks + servers * shared, shared):
        devices.append((f"cuda:{first}" if shared == 1 else f"cuda:{first}–{first + shared - 1}") if has_gpus else "cpu")

    def process(name: str, work: str, memory: int | None, device: str = "cpu", ports: str = "one") -> PlannedProcess:
        return PlannedProcess(name, work, device, f"{ports}, chosen when it starts", memory)

    queue_memory = PLAIN_PROCESS + _queue_bytes(config)
    trainer_memory, server_memory = _trainer(config, facts), _server(config, facts)
    return [
        process("rollouter", "draws prompts, asks for responses, evaluates", PLAIN_PROCESS),
        process("message_queue", "the bounded queue and the ledger", queue_memory, ports="two"),
        process("parameter_sync", "carries policy versions to the servers", TORCH_PROCESS),
        process("reward", "hands out responses, assembles scored groups", PLAIN_PROCESS),
        *(process(f"reward/{i}", "runs reward functions", 2 * PLAIN_PROCESS) for i in range(config.reward.workers)),
        *(process(f"trainer/{i}", "trains", trainer_memory, devices[i], ports="two") for i in range(ranks)),
        *(
            process(f"inference/{i}", _serves(config, i), server_memory, devices[ranks + i], ports="three")
            for i in range(servers)
        ),
        *_teacher(config, facts, process, f"cuda:{ranks + servers * shared}" if has_gpus else "cpu"),
    ]


def _teacher(config: Config, facts: Facts, process: Callable[..., PlannedProcess], device: str) -> list[PlannedProcess]:
    """Its weights, and the logits of a forward pass."""
    if not config.algorithm.serves_teacher:
        return []
    teacher = facts.teacher or ModelFacts()
    known = teacher.parameters is not None
    memory = TORCH_PROCESS + (teacher.parameters or 0) * _width(config) + 8 * 2048 * (teacher.vocabulary or 0)
    return [process("teacher/0", "judges responses", memory if known else None, device, ports="two")]


def _serves(config: Config, index: int) -> str:
    if config.inference.engine == "embedded":
        return "generates"
    if config.inference.attach:
        return f"watches the SGLang server at {config.inference.attach[index].url}"
    return "an SGLang server"


def _context(config: Config) -> int:
    return config.inference.context_tokens or longest_sequence(config)


def _queue_bytes(config: Config) -> int:
    """Both topics at their bound, or at what may be live, whichever is less."""
    rollout, training = config.rollout, config.training
    response_bytes = 25 * (rollout.max_prompt_tokens + rollout.max_response_tokens)
    live = (1 + rollout.staleness_limit) * training.publish_every * training.groups_per_step * config.members_per_group
    return int(2 * min(config.queue.capacity_megabytes * MB, live * response_bytes))


def _trainer(config: Config, facts: Facts) -> int | None:
    """float32 weights, gradients and two moments, a rank's share, of the policy and of a critic; what a checkpoint copies aside
    of them; a reference's weights; two staging slots; activations and logits of a micro-batch."""
    model = facts.model
    if model is None or model.parameters is None:
        return None
    share = model.parameters // config.training.ranks
    slots = 2 * share * _width(config)
    logits = 3 * 4 * config.training.microbatch_tokens * (model.vocabulary or 0)
    layers = 1 if config.model.gradient_checkpointing else (model.layers or 1)
    activations = 4 * config.training.microbatch_tokens * (model.hidden or 0) * layers * ACTIVATIONS_PER_LAYER
    trained = share * (2 if config.algorithm.advantage.needs.critic else 1)
    reference, kept = _reference(config, facts)
    aside = 12 * trained + kept if config.checkpoint.every else 0
    return TORCH_PROCESS + 16 * trained + reference + aside + slots + logits + activations


def _reference(config: Config, facts: Facts) -> tuple[int, int]:
    """Bytes of a rank's share of the reference's float32 weights, and of what a checkpoint holds of them."""
    model = facts.reference or facts.model
    if config.algorithm.kl is None or model is None:
        return 0, 0
    share = 4 * (model.parameters or 0) // config.training.ranks
    return share, share if config.algorithm.reference.refresh_every else 0


def _server(config: Config, facts: Facts) -> int | None:
    """Live and staged weights, and the KV cache of a full batch."""
    model = facts.model
    if model is None or model.parameters is None:
        return None
    cache = 2 * config.inference.max_batch * _context(config) * _width(config)
    cache *= (model.layers or 1) * (model.kv_heads or 1) * (model.head_dim or 64)
    itself = TORCH_PROCESS if config.inference.engine == "embedded" else SGLANG_PROCESSES
    return PLAIN_PROCESS if config.inference.attach else itself + 2 * model.parameters * _width(config) + cache


def _width(config: Config) -> int:
    """Bytes of a served parameter."""
    return 2 if config.model.dtype == "bfloat16" else 4
