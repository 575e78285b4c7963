"""Protocols: what services know of engines, queues, the ledger and trackers. Imports messages, config, errors, clock.

Each protocol has a fake under `asyncrl.simulation` or `tests`, and one conformance suite runs on the real part and the fake.
"""

from asyncrl.protocols.inference import Completion, GenerateRequest, InferenceEngine, MemberRequest, SamplingParams
from asyncrl.protocols.ledger import (
    Dispatch,
    End,
    LedgerClient,
    LedgerEvents,
    LiveGroup,
    PromptCursor,
    Resumption,
    ReturnedGroup,
    StepRecord,
)
from asyncrl.protocols.prompts import Prompt, PromptSource, Tokenizer
from asyncrl.protocols.queue import Delivery, Receiver, Sender
from asyncrl.protocols.teacher import Judgement, Teacher
from asyncrl.protocols.tracking import Tracker
from asyncrl.protocols.training import EngineLauncher, StateFiles, StepOutcome, TrainBatch, TrainingEngine
from asyncrl.protocols.weights import (
    CommitReport,
    Fleet,
    FleetView,
    PolicyVersion,
    ServerLoad,
    ServerView,
    WeightPublisher,
    WeightTarget,
)

__all__ = [
    "CommitReport",
    "Completion",
    "Delivery",
    "Dispatch",
    "End",
    "EngineLauncher",
    "Fleet",
    "FleetView",
    "GenerateRequest",
    "InferenceEngine",
    "Judgement",
    "LedgerClient",
    "LedgerEvents",
    "LiveGroup",
    "MemberRequest",
    "PolicyVersion",
    "Prompt",
    "PromptCursor",
    "PromptSource",
    "Receiver",
    "Resumption",
    "ReturnedGroup",
    "SamplingParams",
    "Sender",
    "ServerLoad",
    "ServerView",
    "StateFiles",
    "StepOutcome",
    "StepRecord",
    "Teacher",
    "Tokenizer",
    "Tracker",
    "TrainBatch",
    "TrainingEngine",
    "WeightPublisher",
    "WeightTarget",
]
