"""What a row of data is: `prompt`, `ground_truth`, `sampling`, and whatever else.

    {"prompt": "1+2+3=", "ground_truth": "6"}
    {"prompt": [{"role": "user", "content": "…"}], "ground_truth": …, "sampling": {"max_new_tokens": 64, "ignore_eos": true}}

Rows travel to reward functions, so they hold what a message holds: None, bool, numbers, text, lists, and mappings keyed by text.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.errors import UserError
from asyncrl.messages.plain import plain
from asyncrl.protocols import Prompt

SAMPLING_KEYS = ("max_new_tokens", "ignore_eos")
LOOKED_AT = 64  # rows that are encoded before anything starts


def prompt_from_row(row: Any, number: int, where: str) -> Prompt:
    """The prompt of row `number` (from 0). `where` names the row in messages: ``data/train.jsonl:17``.

    Text alone is a prompt without ground truth. Raises UserError for a row that is not as the module's docstring says.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row is an object with a prompt, not {_shown(row)}")
    if "prompt" not in row:
        raise UserError(
            f"{where}: the row has no 'prompt', only {', '.join(map(repr, row)) or 'nothing'}: name that field 'prompt'"
        )
    rest = {key: value for key, value in row.items() if key not in ("prompt", "ground_truth", "sampling")}
    return Prompt(
        row=number,
        prompt=_prompt_value(row["prompt"], where),
        ground_truth=_plain(row.get("ground_truth"), "ground_truth", where),
        sampling=_sampling(row.get("sampling"), where),
        extra_info={str(key): _plain(value, str(key), where) for key, value in rest.items()},
    )


def check_prompt(prompt: Prompt, num_tokens: int, *, max_prompt_tokens: int, max_response_tokens: int, key: str) -> None:
    """Refuse a row that this run has no room for. `num_tokens`: of the encoded prompt; `key`: ``data.train`` or ``data.eval``."""
    if num_tokens == 0:
        raise UserError(f"{key}: the prompt of row {prompt.row} has no token: remove the row, or give it text")
    if num_tokens > max_prompt_tokens:
        raise UserError(
            f"{key}: the prompt of row {prompt.row} has {num_tokens} tokens, and rollout.max_prompt_tokens is "
            f"{max_prompt_tokens}: raise it, or shorten or remove the row"
        )
    check_longest_response([prompt], max_response_tokens=max_response_tokens, key=key)


def check_longest_response(prompts: Sequence[Prompt], *, max_response_tokens: int, key: str) -> None:
    """Refuse rows that ask for longer responses than this run has room for; needs no tokenizer."""
    for prompt in prompts:
        wanted = prompt.sampling.get("max_new_tokens", 0)
        if wanted > max_response_tokens:
            raise UserError(
                f"{key}: row {prompt.row} asks for sampling.max_new_tokens {wanted}, and rollout.max_response_tokens is "
                f"{max_response_tokens}: raise it, or lower the row's"
            )


def check_longest_prompts(
    prompts: Sequence[Prompt],
    encode: Callable[[str | list[dict[str, Any]]], Sequence[int]],
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    key: str,
) -> None:
    """`check_prompt` on the rows with the longest text, before anything starts; the others are checked when they are read."""

    def size(prompt: Prompt) -> int:
        return len(prompt.prompt) if isinstance(prompt.prompt, str) else sum(len(str(message)) for message in prompt.prompt)

    suspects = {prompt.row: prompt for prompt in heapq.nlargest(LOOKED_AT, prompts, key=size)}
    check_longest_response(prompts, max_response_tokens=max_response_tokens, key=key)
    for prompt in suspects.values():
        check_prompt(
            prompt,
            len(encode(prompt.prompt)),
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            key=key,
        )


def _prompt_value(value: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        if not value:
            raise UserError(f"{where}: 'prompt' is empty: give it text, or remove the row")
        return str(_plain(str.__str__(value), "prompt", where))
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: 'prompt' is {_shown(value)}: it must be text or a list of chat messages")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(
                f"{where}: message {index} of 'prompt' is {_shown(message)}: a message is an object with a 'role' and a 'content'"
            )
        given = {str(key): part for key, part in message.items() if part is not None or key == "content"}
        messages.append({key: _plain(part, f"prompt[{index}].{key}", where) for key, part in given.items()})
    return messages


def _sampling(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: 'sampling' is {_shown(value)}: it must be an object with {' or '.join(SAMPLING_KEYS)}")
    sampling = {str(key): _plain(part, f"sampling.{key}", where) for key, part in value.items() if part is not None}
    for key, part in sampling.items():
        if key not in SAMPLING_KEYS:
            raise UserError(f"{where}: 'sampling' has the unknown key {key!r}: a row may set {' and '.join(SAMPLING_KEYS)}")
        if key == "max_new_tokens" and (isinstance(part, bool) or not isinstance(part, int) or part < 1):
            raise UserError(f"{where}: sampling.max_new_tokens is {_shown(part)}: it must be a whole number of at least 1")
        if key == "ignore_eos" and not isinstance(part, bool):
            raise UserError(f"{where}: sampling.ignore_eos is {_shown(part)}: it must be true or false")
    return sampling


def _plain(value: Any, name: str, where: str) -> Any:
    """The value as plain data, or UserError."""
    try:
        found = plain(value, name)
        if _has_half_characters(found):
            raise UserError(f"{where}: {name} holds half of a surrogate pair, which is no text: mend or remove the row")
        return found
    except TypeError as error:
        raise UserError(
            f"{where}: {error}, which cannot travel to a reward function: give it as text, numbers or lists"
        ) from error


def _has_half_characters(value: Any) -> bool:
    """Lone surrogates, which JSON can say (``"\\ud83d"``), and neither a tokenizer nor UTF-8 can take."""
    if isinstance(value, str):
        return not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(_has_half_characters(part) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple) and any(map(_has_half_characters, value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
