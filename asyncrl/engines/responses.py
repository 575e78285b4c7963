"""What has arrived of one response, from the servers that were asked for it one after the other. Plain values, no socket.

    server A: tokens 0 … k−1, then lost ──keep──▶ k in hand ──(prompt + k tokens, seed_offset k)──▶ server B: tokens k … n−1
                                                                                    completion: 0 … n−1, as from one server

Every token in hand has its log-prob and its version, and all are of one start of the trainer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.protocols import Completion, MemberRequest, PolicyVersion
from asyncrl.protocols.inference import failed_completion

Tokens = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
MALFORMED = (KeyError, TypeError, IndexError, ValueError, OverflowError, AttributeError)  # of JSON that is not as agreed
_NONE = np.zeros(0, np.int32)
_LIFE, _NUMBERS = secrets.token_hex(4), itertools.count(1)  # no other process, and no other request of this one, has both
UNTRAINED = PolicyVersion(0, 0)  # what a server holds that was never updated


class Outdated(Exception):
    """Tokens of an earlier start of the trainer: nobody may train on them."""


class _Stretch(NamedTuple):
    """Tokens of one server. incarnations: the oldest and the newest among their versions."""

    token_ids: Tokens
    log_probs: LogProbs
    versions: npt.NDArray[np.int32]
    incarnations: tuple[int, int]


class Response:
    """One member's response as far as it is there."""

    __slots__ = ("_chunks", "_floor", "_in_hand", "_length", "_spans", "losses", "member", "rid", "turn")

    def __init__(self, member: MemberRequest):
        self.member = member
        self.turn = 0  # servers that were asked and lost
        self.rid = member.rid  # as the server that is asked knows it
        self.losses = 0  # of those, the last ones that sent no token
        self._in_hand: list[_Stretch] = []
        self._chunks: list[tuple[Tokens, LogProbs]] = []  # of the server being asked
        self._length = 0  # tokens in them
        self._spans: list[Mapping[str, Any]] = []
        self._floor = UNTRAINED

    @property
    def num_in_hand(self) -> int:
        return sum(len(stretch.token_ids) for stretch in self._in_hand) if self._in_hand else 0

    def token_ids(self) -> list[int]:
        """Those in hand, which the next server is told as the end of its prompt."""
        return [token for stretch in self._in_hand for token in stretch.token_ids.tolist()]

    def ask(self, holds: PolicyVersion) -> None:
        """A server is about to be asked. holds: the version that it is known to have, so that no token of it is older.

        The request gets an id that no other has, nor begins with: SGLang ends every request whose id begins as the one to end
        does, and two seconds after a call is over it ends once more what the call asked for."""
        self.rid = f"{self.member.rid}~{_LIFE}.{next(_NUMBERS)};"
        self._chunks, self._length, self._spans, self._floor = [], 0, [], holds

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a chunk in: all tokens so far, as SGLang sends them, or those since the chunk before. Raises one of
        MALFORMED for one that does not add up."""
        meta, ids = event["meta_info"], np.array(event["output_ids"], np.int32)
        length = len(ids)
        logged = meta["output_token_logprobs"] if length else ()
        if len(logged) != length:
            raise ValueError(f"{length} tokens with {len(logged)} log-probs")
        log_probs = np.array([entry[0] for entry in logged], np.float32)
        total = meta.get("completion_tokens", length)
        start = total - length
        if start == self._length:
            self._chunks.append((ids, log_probs))
        elif start == 0 and total > self._length:
            self._chunks = [(ids, log_probs)]
        else:
            raise ValueError(f"a chunk of the tokens {start} to {total} after {self._length} tokens")
        if "weight_versions" in meta:
            self._spans = meta["weight_versions"]
        elif meta.get("finish_reason") is None:
            self._note_version(meta.get("weight_version"), total)
        elif total:
            raise ValueError("no weight_versions in meta_info: the server must be SGLang 0.5.20 or newer")
        self._length = total

    def _note_version(self, text: str | None, total: int) -> None:
        """SGLang tells the spans at the end only. Until then a token is of the older of the versions before and after it."""
        if text is not None:
            version = policy_version(text)
            older, self._floor = min(self._floor, version), version
            self._spans.append({"version": str(older), "start": self._length, "end": total})

    def keep(self, incarnation: int, *, is_suspect: bool = True) -> None:
        """The server is lost. What it sent is in hand from now on, but for tokens of which nobody can say the version, or that an
        older start of the trainer than `incarnation` computed. is_suspect: this response may be why it was lost."""
        before = self.num_in_hand
        if self._length:
            with contextlib.suppress(*MALFORMED):  # spans that do not cover the tokens: those are drawn again
                self._in_hand.append(self._stretch())
        newest = max((stretch.incarnations[1] for stretch in self._in_hand), default=0)
        for place, stretch in enumerate(self._in_hand):
            if stretch.incarnations[0] < max(incarnation, newest):
                del self._in_hand[place:]
                break
        self.losses = 0 if self.num_in_hand > before else self.losses + is_suspect
        self.turn += 1
        self.ask(UNTRAINED)

    def completion(self, finish: Mapping[str, Any], *, server: str, incarnation: int, max_new_tokens: int) -> Completion:
        """The whole, once the server has finished it. Raises Outdated, and as `add` does."""
        reason, failure = finish["type"], None
        if reason == "abort":
            failure = f"aborted: {finish.get('message')}"
            if not self._length and not self._in_hand:
                return failed_completion(self.member.index, server, failure, reason="abort")
        elif reason not in ("stop", "length"):
            raise ValueError(f"finish reason {reason!r}")
        whole = _joined([*self._in_hand, self._stretch()]) if self._in_hand else self._stretch()
        if len(whole.token_ids) > max_new_tokens:
            raise ValueError(f"{len(whole.token_ids)} tokens, and {max_new_tokens} were asked for")
        oldest, newest = whole.incarnations
        if oldest < max(incarnation, newest):
            raise Outdated(
                f"computed by weights of the trainer's start {oldest}, and the present one is {max(incarnation, newest)}"
            )
        return Completion(self.member.index, whole.token_ids, whole.log_probs, whole.versions, reason, server, failure)

    def in_hand(self, server: str) -> Completion:
        """A response whose server was lost when it had sent every token, and had yet to say so."""
        whole = _joined(self._in_hand)
        return Completion(self.member.index, whole.token_ids, whole.log_probs, whole.versions, "length", server)

    def _stretch(self) -> _Stretch:
        token_ids, log_probs = self._chunks[0] if len(self._chunks) == 1 else _concatenated(self._chunks)
        versions, incarnations = _versions(self._spans, len(token_ids))
        return _Stretch(token_ids, log_probs, versions, incarnations)


def _concatenated(chunks: Sequence[tuple[Tokens, LogProbs]]) -> tuple[Tokens, LogProbs]:
    if not chunks:
        return np.zeros(0, np.int32), np.zeros(0, np.float32)
    return np.concatenate([ids for ids, _ in chunks]), np.concatenate([log_probs for _, log_probs in chunks])


def _joined(stretches: Sequence[_Stretch]) -> _Stretch:
    if len(stretches) == 1:
        return stretches[0]
    spoken = [stretch.incarnations for stretch in stretches if len(stretch.token_ids)]
    return _Stretch(
        np.concatenate([stretch.token_ids for stretch in stretches]),
        np.concatenate([stretch.log_probs for stretch in stretches]),
        np.concatenate([stretch.versions for stretch in stretches]),
        (min(oldest for oldest, _ in spoken), max(newest for _, newest in spoken)),
    )


def _versions(spans: Sequence[Mapping[str, Any]], length: int) -> tuple[npt.NDArray[np.int32], tuple[int, int]]:
    """int32[length], each token's version, and the oldest and newest incarnation among them. The spans must cover the tokens
    exactly."""
    stretches: list[npt.NDArray[np.int32]] = []
    position, oldest, newest = 0, 1 << 62, 0
    for span in spans:
        start, end = span["start"], span["end"]
        if start != position or not position <= end <= length:
            raise ValueError(f"weight_versions {spans!r} do not follow one another over {length} tokens")
        incarnation, version = policy_version(span["version"])
        stretches.append(_of_one_version(version, end - start))
        position = end
        if incarnation < oldest:
            oldest = incarnation
        if incarnation > newest:
            newest = incarnation
    if position != length:
        raise ValueError(f"weight_versions {spans!r} cover {position} of {length} tokens")
    return stretches[0] if len(stretches) == 1 else np.concatenate([_NONE, *stretches]), (oldest, newest)


@functools.lru_cache(maxsize=256)
def _of_one_version(version: int, length: int) -> npt.NDArray[np.int32]:
    """One for all stretches of this version and length; read-only."""
    versions = np.full(length, version, np.int32)
    versions.flags.writeable = False
    return versions


@functools.lru_cache(maxsize=64)
def policy_version(text: str) -> PolicyVersion:
    """A server that was never updated says "default": version 0 of no incarnation; so is a plain number."""
    if text == "default":
        return UNTRAINED
    return PolicyVersion.parse(text) if "." in text else PolicyVersion(0, int(text))
