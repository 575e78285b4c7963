"""The schema of pipeline.yaml: one frozen pydantic model per section, in the order of the file.

Every field has a sentence (printed by `asyncrl check --explain KEY`) and a default unless it is required. What one field
alone can say wrong is refused here; what two fields say wrong together is in `checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from asyncrl.config.components import component_names
from asyncrl.config.entries import Advantage, Correction, Grpo, KlTerm, Loss, PpoClip, StalenessTis


class Section(BaseModel):
    """Strict (no coercion), frozen, and closed to unknown keys. Build one from YAML through `asyncrl.config.load_config`, which
    reports every problem at once, with its line."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


HUGE = 2**31
"""Whole numbers stay below: they are counted in arrays, in SQLite and in msgpack, whose integers end."""


def _countable(value: int) -> int:
    if value >= HUGE:
        raise PydanticCustomError("huge", "too large to count")
    return value


Whole = Annotated[int, AfterValidator(_countable)]


def _whole_or_auto(value: object) -> object:
    """Judged as one, so that a wrong value is one problem, not one for each kind that it might have been."""
    if value == "auto":
        return value
    if type(value) is not int or value < 0:
        raise PydanticCustomError("whole_or_auto", "neither a whole number nor auto")
    return _countable(value)


WholeOrAuto = Annotated[Annotated[int, Ge(0)] | Literal["auto"], BeforeValidator(_whole_or_auto)]

NAME_PATTERN, HTTP_PATTERN, TCP_PATTERN = r"^[A-Za-z0-9._-]+$", r"^http://[^/?#\s]+$", r"^tcp://[^/?#\s]+:[0-9]+$"
PATTERNS = {
    NAME_PATTERN: "of letters, digits, dots, dashes and underscores",
    HTTP_PATTERN: "http://host:port",
    TCP_PATTERN: "tcp://host:port",
}
"""What a text must look like, in words."""


def _sampled(value: float) -> float:
    if value <= 0:
        raise PydanticCustomError(
            "rule",
            "rollout.temperature is {value}, but training needs sampled responses, and log-probs of greedy decoding cannot be "
            "corrected: set rollout.temperature above 0, usually to 1.0",
            {"value": f"{value:g}"},
        )
    return value


def _whole_distribution(key: str, off: float) -> AfterValidator:
    """Sampling must draw from the whole distribution, whose log-probs the trainer can compute."""

    def rule(value: float) -> float:
        if value != off:
            raise PydanticCustomError(
                "rule",
                "{key} is {value}, but log-probs of a truncated distribution cannot be corrected: set {key} to {off} (off)",
                {"key": key, "value": f"{value:g}", "off": f"{off:g}"},
            )
        return value

    return AfterValidator(rule)


class ModelConfig(Section):
    path: str = Field(min_length=1, description="A Hugging Face folder or hub name, or a built-in such as builtin/arithmetic.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the trainer's forward and backward pass and of the served weights."
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention implementation; auto takes flash_attention_2 on a GPU that has it, else sdpa."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass: less memory, more time.")
    tokenizer: str | None = Field(None, min_length=1, description="Where the tokenizer lies, if not beside the model.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model folder. Off unless you trust its author."
    )


class DataConfig(Section):
    train: str = Field(
        min_length=1,
        description="Training prompts: a .jsonl or .parquet file, a built-in task, or a Python callable pkg.mod:fn or file.py:fn that yields rows.",
    )
    eval: str | None = Field(
        None, min_length=1, description="Held-out prompts for evaluation, in the same forms; null switches evaluation off."
    )
    shuffle: bool = Field(
        True,
        description="Visit the rows of each epoch in an order drawn from the seed; false keeps the file's order, which a callable that yields rows as a stream always has.",
    )
    epochs: Whole | None = Field(
        None, ge=1, description="How often the rows are visited before the data ends; null goes on until training.steps are done."
    )


class RolloutConfig(Section):
    group_size: Whole = Field(8, ge=1, description="Responses asked of each prompt.")
    max_prompt_tokens: Whole = Field(512, ge=1, description="A longer prompt is refused by name when its row is read.")
    max_response_tokens: Whole = Field(512, ge=1, description="Most tokens in one response.")
    temperature: Annotated[float, AfterValidator(_sampled)] = Field(
        1.0, description="Sampling temperature, above 0; the trainer divides its logits by it."
    )
    top_p: Annotated[float, _whole_distribution("rollout.top_p", 1)] = Field(
        1.0, description="Must be 1 in training: log-probs of a truncated distribution cannot be corrected."
    )
    top_k: Annotated[int, _whole_distribution("rollout.top_k", -1)] = Field(
        -1, description="Must be -1 (off) in training, for the same reason."
    )
    preset: Literal["one_step_off", "on_policy"] | None = Field(
        None,
        description="Keys set together, where the file does not say them (see asyncrl.config.presets). on_policy: each batch is generated by the policy that trains on it; one_step_off: the next batch is generated while one trains; null sets nothing.",
    )
    max_staleness: WholeOrAuto = Field(
        2,
        description="No token older than this many versions contributes a gradient; 0 is on-policy, exactly; auto adapts how far generation runs ahead, between staleness_floor and staleness_ceiling.",
    )
    staleness_floor: Whole = Field(
        1, ge=1, description="With max_staleness auto, the bound that it begins at and never goes below."
    )
    staleness_ceiling: Whole = Field(
        8, ge=2, description="With max_staleness auto, the bound's largest value: no older token contributes a gradient."
    )
    on_stale: Literal["mask", "reissue", "wait"] = Field(
        "mask",
        description="What happens to tokens past the bound: mask them, expire the group and ask again, or wait so that nothing expires.",
    )
    max_concurrent: Whole = Field(256, ge=1, description="Most trajectories being generated at once.")
    agent: str = Field(
        "single_turn",
        min_length=1,
        description="How a member becomes a trajectory: single_turn, or a Python callable pkg.mod:fn or file.py:fn.",
    )
    generation_retries: Whole = Field(
        2, ge=0, description="How often a failed generation is tried again before the member is recorded as failed."
    )
    request_timeout_seconds: float = Field(
        300.0, gt=0, description="Deadline of one generation, the wait for a server that takes traffic included."
    )
    quarantine_after: Whole = Field(
        3,
        ge=0,
        description="A prompt of which this many attempts in a row failed (one an epoch) is not generated any more; 0 always tries again.",
    )

    @property
    def staleness_limit(self) -> int:
        """No token older than so many versions ever trains: `max_staleness`, or its ceiling under auto."""
        return self.staleness_ceiling if self.max_staleness == "auto" else self.max_staleness

    def staleness_bound(self, adapted: int | None) -> int:
        """What admission goes by now. adapted: the bound that the trainer said last, None before its first step."""
        if self.max_staleness != "auto":
            return self.max_staleness
        return max(self.staleness_floor, min(adapted or 0, self.staleness_ceiling))


class AttachedServer(Section):
    url: str = Field(pattern=HTTP_PATTERN, description="HTTP address of a running SGLang server, such as http://10.0.0.2:30000.")
    receiver: str | None = Field(
        None,
        pattern=TCP_PATTERN,
        description="Where the server's weight receiver listens, as its ASYNCRL_RECEIVER says; sync.mode staged needs it.",
    )


def _server_arguments(values: dict[Any, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str | int | float)):
            raise PydanticCustomError(
                "rule",
                "inference.arguments has {name}: {value}, but takes arguments by their names, each a text, a number, true or null: "
                "write them as {{chunked-prefill-size: 2048}}",
                {"name": str(name), "value": repr(value)},
            )
    return values


ServerArguments = Annotated[dict[Any, Any], AfterValidator(_server_arguments)]


class InferenceConfig(Section):
    engine: Literal["embedded", "sglang"] = Field(
        "embedded", description="What serves generation: the embedded engine, or SGLang servers."
    )
    servers: Whole = Field(1, ge=1, description="Inference servers, each a process of its own.")
    context_tokens: Whole | None = Field(
        None,
        ge=2,
        description="Prompt plus response that a server has room for; null takes max_prompt_tokens + max_response_tokens.",
    )
    max_batch: Whole = Field(128, ge=1, description="Sequences that one server decodes at once.")
    python: str | None = Field(
        None, min_length=1, description="Python of the environment that has SGLang; null is the one that runs asyncrl."
    )
    launcher: str | None = Field(
        None,
        min_length=1,
        description="Script that starts a server in place of `-m sglang.launch_server`: deploy/sglang-cpu/launch.py where there is no GPU.",
    )
    attach: list[AttachedServer] = Field(
        default_factory=list,
        description="Running SGLang servers to use, one for each of inference.servers, instead of starting any.",
    )
    tensor_parallel: Whole = Field(1, ge=1, description="GPUs that share one SGLang server's model.")
    memory_fraction: float | None = Field(
        None, gt=0, lt=1, description="Share of a GPU's memory for SGLang's weights and KV cache; null leaves it to SGLang."
    )
    arguments: ServerArguments = Field(
        default_factory=dict,
        description="Further arguments of the SGLang servers by their long names, such as {chunked-prefill-size: 2048}; held against the server's own list before it starts.",
    )
    batch_invariant: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether tokens and log-probs depend, bit for bit, on prompt and seed alone, whatever else is served; auto: where rollout.max_staleness is 0 and the model can be served so.",
    )


class RewardFunction(Section):
    function: str = Field(min_length=1, description="exact_match, contains, numeric, or your own pkg.mod:fn or file.py:fn.")
    weight: float = Field(1.0, description="Factor of this function's score in the total reward.")


class RewardConfig(Section):
    functions: list[RewardFunction] = Field(min_length=1, description="Reward functions; the total is their weighted sum.")
    workers: Whole = Field(1, ge=1, description="Processes that run reward functions.")
    concurrency: Whole = Field(
        32, ge=1, description="Calls of async reward functions that one worker has open at once; sync ones run one at a time."
    )
    timeout_seconds: float = Field(
        10.0, gt=0, description="Time limit of one call; past it the sample failed, and the worker is free again."
    )
    min_scored: Whole = Field(2, ge=1, description="A group with fewer scored members than this failed.")
    max_failed_groups: Whole = Field(
        256, ge=0, description="So many groups that failed in a row, none scored in between, end the run; 0 never does."
    )
    max_worker_deaths: Whole = Field(
        2, ge=1, description="A sample that this many workers died with is a failed sample; until then it is handed out again."
    )

    @property
    def component_weights(self) -> dict[str, float]:
        """Each function's weight by the name that its scores have in a scored group, in the order of `functions`."""
        names = component_names([each.function for each in self.functions])
        return dict(zip(names, (each.weight for each in self.functions), strict=True))


class QueueConfig(Section):
    capacity: Whole = Field(256, ge=1, description="Most messages waiting per topic: trajectories in rollouts, groups in scored.")
    capacity_megabytes: float = Field(256.0, gt=0, description="Most bytes waiting per topic, in megabytes (10^6).")
    durability: Literal["none", "process", "power"] = Field(
        "none",
        description="What accepted messages survive. none: nothing; what was queued when the queue's process ends is generated again. process: the end of any process of the run, power cuts apart (payloads are written to a file before the sender hears of their acceptance). power: a power cut too (the file is synced first; slower).",
    )
    reconnect_seconds: float = Field(
        60.0, gt=0, description="A queue that does not answer for this long, while its process is started again, ends the caller."
    )
    lease_seconds: float = Field(
        30.0, gt=0, description="A consumer or producer silent for this long is taken for dead: its leases and credits return."
    )


class CriticConfig(Section):
    learning_rate: float = Field(
        1.0e-5, gt=0, description="AdamW's peak learning rate of the critic; training.schedule is its too."
    )
    warmup_steps: Whole = Field(0, ge=0, description="First steps in which the critic learns and the policy does not.")
    value_clip: float = Field(0.5, gt=0, description="A value moves at most this far from that before the step, for its loss.")
    path: str | None = Field(
        None, min_length=1, description="Model folder or hub name that the critic starts from; null: the policy's own weights."
    )


class TeacherConfig(Section):
    path: str | None = Field(
        None, min_length=1, description="Model folder or hub name that a server of the run's own serves, frozen: row teacher/0."
    )
    url: str | None = Field(
        None, pattern=HTTP_PATTERN, description="HTTP address of a running SGLang server that serves the teacher."
    )
    timeout_seconds: float = Field(
        60.0, gt=0, description="A response that the teacher has not judged by then is a failed sample; retries are within it."
    )


class ReferenceConfig(Section):
    path: str | None = Field(
        None, min_length=1, description="Model folder or hub name of the reference; null: the policy's own weights at the start."
    )
    refresh_every: Whole = Field(
        0, ge=0, description="The policy's weights of each version that this divides become the reference; 0 never changes it."
    )


class AlgorithmConfig(Section):
    advantage: Advantage = Field(default_factory=Grpo, description="Advantage estimator.")
    loss: Loss = Field(default_factory=PpoClip, description="Policy loss.")
    correction: Correction = Field(default_factory=StalenessTis, description="Importance correction of stale tokens.")
    proximal: Literal["recompute", "behave", "loglinear"] = Field(
        "recompute",
        description="Anchor of the trust region: recomputed under the trainer's weights, the behaviour policy, or a point between it and the current one by each token's staleness (loglinear).",
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic of algorithm.advantage gae.")
    teacher: TeacherConfig = Field(
        default_factory=TeacherConfig, description="The teacher of algorithm.advantage distillation: a path or a url."
    )
    kl: KlTerm = Field(
        None, description="Divergence of the policy from a reference model, in the loss or the reward; null is off."
    )
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="The reference model of algorithm.kl.")
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        description="c: the loss gets −c times the policy's entropy of each token, in nats, with its gradient; 0 is off.",
    )

    @property
    def serves_teacher(self) -> bool:
        """Whether the run has a server of its own for the teacher."""
        return self.advantage.needs.teacher and self.teacher.path is not None


class TrainingConfig(Section):
    steps: Whole = Field(ge=1, description="Steps to train.")
    groups_per_step: Whole = Field(16, ge=1, description="Prompt groups the trainer takes per step.")
    mini_batches: Whole = Field(1, ge=1, description="Optimizer updates one pass over a batch is cut into.")
    epochs_per_batch: Whole = Field(1, ge=1, description="Passes over each batch.")
    publish_every: Whole = Field(1, ge=1, description="A new policy version goes out after this many steps.")
    ranks: Whole = Field(1, ge=1, description="FSDP2 trainer processes.")
    filter: Literal["keep", "drop", "refill"] = Field(
        "drop", description="Groups whose rewards are all equal: train them, drop them, or drop them and take others."
    )
    max_refill_factor: float = Field(
        3.0, ge=1, description="Under refill, at most this many times groups_per_step groups are looked at per step."
    )
    learning_rate: float = Field(1.0e-6, gt=0, description="AdamW's peak learning rate.")
    warmup_steps: Whole = Field(0, ge=0, description="Steps over which the learning rate rises from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up; its end is training.steps."
    )
    final_learning_rate_factor: float = Field(0.0, ge=0, le=1, description="Share of the peak that a decaying schedule ends at.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second-moment decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    microbatch_tokens: Whole = Field(8192, ge=1, description="Most tokens (padding included) of one forward pass.")
    max_bad_steps: Whole = Field(5, ge=1, description="This many steps in a row without a finite update end the run.")
    step_timeout_seconds: float = Field(1800.0, gt=0, description="Deadline of one step's computation, collectives included.")
    data_timeout_seconds: float = Field(1800.0, gt=0, description="The run fails when no scored group arrives for this long.")


class SyncConfig(Section):
    mode: Literal["staged", "broadcast", "disk"] = Field(
        "staged",
        description="How a new version reaches the servers. staged: shards travel while they decode, and are swapped in between two steps; broadcast: whole tensors through SGLang's update group (NCCL or gloo), under a pause; disk: safetensors in a folder that servers read, under a pause.",
    )
    folder: str | None = Field(
        None, min_length=1, description="Folder for the versions of mode disk, which every server sees; null: the run directory."
    )
    transport: Literal["auto", "shared_memory", "zeromq"] = Field(
        "auto",
        description="What carries the shards; auto takes shared_memory to servers that listen on loopback, zeromq to all others.",
    )
    kv_policy: Literal["keep", "recompute"] = Field(
        "keep", description="In-flight requests keep their KV cache, or are prefilled again under the new weights."
    )
    verify: bool = Field(True, description="Servers recompute the digest of their live parameters after a commit.")
    verify_every: Whole = Field(
        1, ge=1, description="With verify, the first version is compared and then each version that this divides; 1 compares all."
    )
    bucket_megabytes: float = Field(16.0, gt=0, description="Most bytes of one bucket, in megabytes (10^6).")
    max_megabytes_per_second: float | None = Field(
        None, gt=0, description="Throttle of the transfer to each server; null is full speed."
    )
    timeout_seconds: float = Field(60.0, gt=0, description="Deadline of each move of an update; a server past it is STALE.")
    silence_seconds: float = Field(
        10.0, gt=0, description="A server that answers nothing for this long is DEAD: no traffic until it answers and confirms."
    )


class CheckpointConfig(Section):
    every: Whole = Field(0, ge=0, description="Steps between checkpoints; one more at the end and at a stop; 0 is off.")
    keep: Whole = Field(2, ge=1, description="The newest so many checkpoints are kept.")
    best: str | None = Field(
        None,
        min_length=1,
        description="A metric such as eval/score or reward/mean: the checkpoint with its highest value is kept beside the newest; null keeps those alone.",
    )
    timeout_seconds: float = Field(
        600.0, gt=0, description="A checkpoint that is not written within this time has failed; the run goes on without it."
    )


class EvalConfig(Section):
    every: Whole = Field(50, ge=0, description="Steps between evaluations; 0 leaves the first and the last.")
    samples: Whole = Field(
        512, ge=1, description="Responses scored per evaluation, over as many held-out prompts as there are, in turn."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of evaluation; 0 is greedy.")


class MlflowConfig(Section):
    uri: str = Field("sqlite:///mlflow.db", min_length=1, description="MLflow's tracking store.")
    experiment: str = Field("asyncrl", min_length=1, description="MLflow experiment of the run.")


class TrackingConfig(Section):
    mlflow: MlflowConfig | None = Field(default_factory=MlflowConfig, description="MLflow tracking; null switches it off.")
    samples_per_step: Whole = Field(
        16, ge=0, description="Trained trajectories whose text each step keeps for `asyncrl samples`; failed ones are all kept."
    )


class ClusterConfig(Section):
    ray_address: str | None = Field(
        None, min_length=1, description="Address of a running Ray cluster; null starts one for this run."
    )
    bind_address: str = Field(
        "127.0.0.1",
        description="IPv4 address at which the run's services listen: 127.0.0.1 (this machine alone), an address of this machine, or 0.0.0.0 where several hosts take part. Beyond loopback ZeroMQ speaks CURVE and HTTP wants a token, with keys made for the launch, which lie in the run directory for its owner alone.",
    )
    state_dir: str | None = Field(
        None,
        min_length=1,
        description="Local folder for the ledger and the queue's journal, which a network file system cannot keep; each run takes a folder of its own in it. null: the run directory.",
    )
    start_timeout_seconds: float = Field(120.0, gt=0, description="Every service must be up by then.")
    silence_seconds: float = Field(
        120.0, gt=0, description="A process that answers nothing for this long hangs: it is ended, and started again or named."
    )
    stop_grace_seconds: float = Field(10.0, gt=0, description="Time a service has to end by itself before it is killed.")
    preemption_grace_seconds: float = Field(30.0, gt=0, description="After SIGTERM the run has saved and ended within this time.")
    max_restarts: Whole | None = Field(
        None,
        ge=0,
        description="How often a lost process is started again while the run makes no new step; 0 ends the run at once, by its name. "
        "null is 5 where checkpoint.every or queue.durability keeps something to go on from, and for SGLang servers, else 0.",
    )


class Config(Section):
    """A whole pipeline.yaml, resolved."""

    name: str = Field("run", pattern=NAME_PATTERN, description="Name of the run; letters, digits, dot, dash, underscore.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the prompt order, of sampling, and of everything else drawn.")
    model: ModelConfig = Field(description="The policy.")
    data: DataConfig = Field(description="Prompts.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    inference: InferenceConfig = Field(default_factory=InferenceConfig, description="Inference servers.")
    reward: RewardConfig = Field(description="Scoring.")
    queue: QueueConfig = Field(default_factory=QueueConfig, description="The bounded queue.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="Advantage, loss and correction.")
    training: TrainingConfig = Field(description="Optimisation.")
    sync: SyncConfig = Field(default_factory=SyncConfig, description="Weight updates.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Where figures go.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Processes.")

    @property
    def members_per_group(self) -> int:
        """Trajectories of each prompt group: rollout.group_size samples, and the greedy response where the advantage needs
        one."""
        return self.rollout.group_size + self.algorithm.advantage.needs.greedy

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, complete: launching them again is the same run."""
        return self.model_dump(mode="json")
