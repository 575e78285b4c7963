"""Prompts, where they come from, and the tokenizer as services see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.protocols.ledger import PromptCursor


@dataclass(frozen=True)
class Prompt:
    """A row of data. `prompt` is text or a list of chat messages; `sampling` may hold max_new_tokens and ignore_eos in place of
    the run's; whatever else the row carries is `extra_info`."""

    row: int
    prompt: str | list[dict[str, Any]]
    ground_truth: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)
    extra_info: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """Rows in a resumable order."""

    @property
    def num_rows(self) -> int | None:
        """Rows of one epoch; None for an endless source."""

    def next(self) -> tuple[int, Prompt] | None:
        """(epoch, prompt) of the next row, or None at the end of the data."""

    def row(self, row: int) -> Prompt:
        """A row by its number, for reissues. Raises KeyError for a row that this source never gave."""

    def cursor(self) -> PromptCursor:
        """Where `next` stands."""


class Tokenizer(Protocol):
    """Text to ids and back. `encode_prompt` applies the chat template to messages (with the generation prompt)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode_prompt(self, prompt: str | list[dict[str, Any]]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...
