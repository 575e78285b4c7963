"""Every error asyncrl raises on purpose, one tree.

    AsyncrlError
    ├── UserError                 the user's mistake: exit code 2, no traceback
    │   └── ConfigError           one or more problems in a pipeline file or its overrides
    ├── RunError                  the run failed: exit code 1
    │   ├── ServiceDied           a process of the run ended by itself
    │   ├── StorageFailed         a disk refused what the run cannot do without
    │   └── StartTimeout          a service did not come up before the deadline
    ├── Interrupted               stop, Ctrl-C, SIGTERM: exit code 130
    ├── FrameError                bytes from a socket that are not a message
    │   ├── MalformedFrame, TruncatedFrame, OversizedFrame
    │   └── UnknownTag, UnknownSchema
    ├── TransportError            a peer did not do its part
    │   ├── DeadlineExceeded, StreamClosed, MessageTooLarge, UnknownSender
    │   └── RemoteError           a remote call raised; carries the remote error's type and text
    ├── LedgerError               IllegalTransition, LedgerCorrupt
    ├── CheckpointError           a checkpoint could not be written, read or exported; a run goes on without one
    ├── SyncError                 StaleIncarnation, NotRegistered, DigestMismatch, PlanMismatch
    ├── GenerationFailed          a server could not produce a response
    └── RewardFailed              a reward function raised, timed out or returned no number

A message says the rule, the value found and the remedy. Bugs are `assert`s, not members of this tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class AsyncrlError(Exception):
    """Root of every deliberate error."""


class UserError(AsyncrlError):
    """Something the user can mend before anything starts."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    key: dotted path, such as ``queue.capacity``; line: 1-based line in the file or None for an override; source: the file, or
    the override as it was given. The message names the key.
    """

    key: str
    message: str
    line: int | None = None
    source: str | None = None

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.source, self.line) if part is not None)
        return f"{where}: {self.message}" if where else self.message


class ConfigError(UserError):
    """All problems found in one configuration, at once."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


class RunError(AsyncrlError):
    """The run cannot go on."""


class ServiceDied(RunError):
    """A process of the run ended without being asked to."""

    def __init__(self, service: str, reason: str, log_tail: Sequence[str] = ()):
        self.service = service
        self.reason = reason
        self.log_tail = tuple(log_tail)
        super().__init__(f"service {service} died: {reason}")


class StorageFailed(RunError):
    """A disk refused what the run cannot do without."""


class StartTimeout(RunError):
    """Start-up passed its deadline."""

    def __init__(self, missing: Sequence[str], seconds: float):
        self.missing = tuple(missing)
        super().__init__(
            f"not up after {seconds:.0f} s (cluster.start_timeout_seconds): {', '.join(missing)}; "
            "read their files under logs/, or raise cluster.start_timeout_seconds"
        )


class Interrupted(AsyncrlError):
    """The run was asked to end."""


class FrameError(AsyncrlError):
    """Bytes that are not a message of ours."""


class MalformedFrame(FrameError):
    """The header or an array does not have the form that its tag prescribes."""


class TruncatedFrame(FrameError):
    """Fewer frames or bytes than the header announces."""


class OversizedFrame(FrameError):
    """More bytes than the receiver admits."""


class UnknownTag(FrameError):
    """The header names no message type."""


class UnknownSchema(FrameError):
    """The header carries a schema version that this build does not read."""


class TransportError(AsyncrlError):
    """A peer did not do its part."""


class DeadlineExceeded(TransportError):
    """A wait passed its deadline."""


class StreamClosed(TransportError):
    """The other side ended the stream; nothing more will come."""


class UnknownSender(TransportError):
    """The queue has not heard of this sender: it is a new process, and the sender must open again."""


class MessageTooLarge(TransportError):
    """A single message is larger than the whole queue."""


class RemoteError(TransportError):
    """A remote call raised."""

    def __init__(self, method: str, kind: str, text: str):
        self.method, self.kind, self.text = method, kind, text
        super().__init__(f"{method} raised {kind}: {text}")


class LedgerError(AsyncrlError):
    """The ledger refused something."""


class IllegalTransition(LedgerError):
    """An attempt was moved to a state that its present one does not lead to."""


class LedgerCorrupt(LedgerError):
    """The ledger's file does not hold what a ledger holds."""


class CheckpointError(AsyncrlError):
    """A checkpoint could not be written, or does not hold what a checkpoint holds."""


class SyncError(AsyncrlError):
    """A weight update did not go as the protocol says."""


class StaleIncarnation(SyncError):
    """A message from an earlier start of the trainer."""


class NotRegistered(SyncError):
    """A trainer rank that this ParameterSync does not know yet: it has to say what it has first."""


class DigestMismatch(SyncError):
    """Weights arrived that are not the ones sent."""


class PlanMismatch(SyncError):
    """The plan and the model disagree on a name, a shape or a slice."""


class GenerationFailed(AsyncrlError):
    """A server could not produce a response."""


class RewardFailed(AsyncrlError):
    """A reward function raised, timed out, or returned no number: a failed sample with its reason."""
