"""A step's groups as arrays: whole-batch tensors for what is padded by response, and padded input for one micro-batch.

B responses (members of all groups, in order), T positions of the longest response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.messages import ScoredGroup

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepArrays:
    """tokens int64: prompt and response of each sequence, end to end; starts_B: where each begins; prompt_lengths_B; groups_B:
    index of each response's group; ids_B int64: a number of each response's own, whatever else is in the batch; the rest [B, T]
    by response position: mask bool, behaviour float32, staleness int64 ≥ 0."""

    tokens: Ints
    starts_B: Ints
    prompt_lengths_B: Ints
    groups_B: Ints
    ids_B: Ints
    rewards_B: torch.Tensor
    mask_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    staleness_BT: torch.Tensor


@dataclass(frozen=True)
class MicroInputs:
    """One forward pass. input_ids int64[b, L]; rows_N, columns_N, targets_N: the trainable tokens and where they are predicted,
    in the order of the True positions of mask_bt = batch mask[sequences, :t]."""

    input_ids: torch.Tensor
    rows_N: torch.Tensor
    columns_N: torch.Tensor
    targets_N: torch.Tensor


def collate_step(groups: Sequence[ScoredGroup], version: int) -> StepArrays:
    """Lay the groups out; `version` is the trainer's when the step began."""
    assert all(len(group.prompt_tokens) for group in groups), (
        "the first response token is predicted from the prompt: it has a token"
    )
    groups_B = np.repeat(np.arange(len(groups)), [len(group.lengths) for group in groups])
    lengths_B = _joined([group.lengths for group in groups]).astype(np.int64)
    prompt_lengths_B = np.array([len(group.prompt_tokens) for group in groups], dtype=np.int64)[groups_B]
    totals_B = prompt_lengths_B + lengths_B
    within_BT = np.arange(int(lengths_B.max(initial=0))) < lengths_B[:, None]

    def padded(values: npt.NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
        whole = np.zeros(within_BT.shape, dtype=dtype)
        whole[within_BT] = values
        return torch.from_numpy(whole)

    return StepArrays(
        tokens=_sequences(groups, prompt_lengths_B, lengths_B),
        starts_B=np.cumsum(totals_B) - totals_B,
        prompt_lengths_B=prompt_lengths_B,
        groups_B=groups_B,
        ids_B=np.array([_response_id(group, member) for group in groups for member in range(len(group.lengths))], np.int64),
        rewards_B=torch.from_numpy(_joined([group.rewards for group in groups]).astype(np.float32)),
        mask_BT=padded(_joined([group.loss_mask for group in groups]), np.bool_),
        behaviour_BT=padded(_joined([group.log_probs for group in groups]), np.float32),
        staleness_BT=padded(np.maximum(0, version - _joined([group.versions for group in groups])), np.int64),
    )


def collate_components(groups: Sequence[ScoredGroup], names: Sequence[str]) -> torch.Tensor:
    """float32[B, K]: each response's score by each of these reward functions; NaN where there is none."""
    absent = [np.full(len(group.lengths), np.nan, np.float32) for group in groups]
    columns = [
        _joined([group.components.get(name, nothing) for group, nothing in zip(groups, absent, strict=True)]) for name in names
    ]
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))


def collate_teacher(groups: Sequence[ScoredGroup], like_BT: torch.Tensor) -> torch.Tensor:
    """float32[B, T]: log-probs under the teacher, NaN where it judged nothing."""
    whole_BT, row = torch.full_like(like_BT, torch.nan), 0
    for group in groups:
        ends = np.cumsum(group.lengths)
        for start, end in zip(ends - group.lengths, ends, strict=True):
            if len(group.teacher_log_probs):
                whole_BT[row, : end - start] = torch.from_numpy(group.teacher_log_probs[start:end].copy())
            row += 1
    return whole_BT


def collate_greedy(groups: Sequence[ScoredGroup]) -> torch.Tensor:
    """float32[B]: the reward of the greedy response to each response's prompt; NaN where there is none."""
    rewards = [np.nan if group.greedy is None else group.greedy.reward for group in groups]
    return torch.from_numpy(np.repeat(np.array(rewards, np.float32), [len(group.lengths) for group in groups]))


def input_lengths(arrays: StepArrays, mask_BT: torch.Tensor) -> Ints:
    """Tokens that a forward pass must read per response: up to the one before its last trainable token; 0 where none is
    trainable."""
    mask = mask_BT.numpy()
    last_B = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1) if mask.size else np.zeros(len(mask), np.int64)
    return np.where(mask.any(axis=1), arrays.prompt_lengths_B + last_B, 0)


def micro_inputs(arrays: StepArrays, sequences: Sequence[int], mask_bt: torch.Tensor, lengths_b: Ints) -> MicroInputs:
    """Input of the sequences with these indices; `lengths_b` are their input lengths, `mask_bt` their rows of the mask."""
    chosen = np.asarray(sequences, dtype=np.int64)
    starts_b, prompts_b = arrays.starts_B[chosen], arrays.prompt_lengths_B[chosen]
    offsets_L = np.arange(int(lengths_b.max(initial=1)))
    source_bL = np.minimum(starts_b[:, None] + offsets_L, len(arrays.tokens) - 1)
    input_ids = np.where(offsets_L < lengths_b[:, None], arrays.tokens[source_bL], 0)
    rows_N, positions_N = np.nonzero(mask_bt.numpy())
    columns_N = prompts_b[rows_N] + positions_N - 1
    targets_N = arrays.tokens[starts_b[rows_N] + columns_N + 1]
    return MicroInputs(*(torch.from_numpy(values) for values in (input_ids, rows_N, columns_N, targets_N)))


def _response_id(group: ScoredGroup, member: int) -> int:
    """A hash of 64 bits."""
    digest = hashlib.blake2b(f"{group.id}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _sequences(groups: Sequence[ScoredGroup], prompt_lengths_B: Ints, lengths_B: Ints) -> Ints:
    """Of each response its group's prompt, then the response, end to end."""
    of_prompt = np.repeat(np.tile([True, False], len(lengths_B)), np.stack([prompt_lengths_B, lengths_B], axis=1).ravel())
    tokens = np.empty(len(of_prompt), dtype=np.int64)
    tokens[of_prompt] = _joined([group.prompt_tokens for group in groups for _ in range(len(group.lengths))])
    tokens[~of_prompt] = _joined([group.response_tokens for group in groups])
    return tokens


def _joined(parts: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)
