"""SGLang's /generate in JSON: requests read strictly, responses written.

A parameter that this engine does not act on is refused by name, unless it has the value that means "off".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncrl.engines.embedded import sequences
from asyncrl.engines.embedded.sequences import Sampling, Update

Json = dict[str, Any]
Tokens = np.ndarray[Any, np.dtype[np.int32]]
MAX_BATCH = 4096
DEFAULT_MAX_NEW_TOKENS = 128

FIELDS = ("input_ids", "text", "sampling_params", "return_logprob", "rid", "stream", "incremental", "extra_key")
SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "sampling_seed", "seed_offset", "n",
    "stream_interval", "skip_special_tokens",
)  # fmt: skip
OFF_FIELDS: Json = {"logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False, "log_metrics": True}
OFF_SAMPLING: Json = {
    "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0,
    "spaces_between_special_tokens": True, "no_stop_trim": False,
}  # fmt: skip


class BadRequest(Exception):
    """A request that cannot be served as it stands: HTTP 400 with this text."""


@dataclass(frozen=True)
class Limits:
    """What the engine can do. `encode` turns text into ids; None when it has no tokenizer."""

    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]] | None = None


class _Share(NamedTuple):
    """What the members of a group have in common."""

    num_samples: int
    sampling: Sampling
    skip_special_tokens: bool


@dataclass(frozen=True)
class Call:
    """One /generate. `batch`: the response is a list; `texts`: responses carry text, with these special-token settings."""

    sequences: tuple[sequences.Sequence, ...]
    stream: bool
    return_logprob: bool
    batch: bool
    texts: bool
    skip_special_tokens: bool


def parse_generate(body: Any, limits: Limits, sink: Any) -> Call:
    """`body` is used up. Raises BadRequest, which names the field, its value and the remedy."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    _refuse_unknown(body, FIELDS, OFF_FIELDS, "field")
    prompts, batch, texts = read_prompts(body, limits)
    stream, is_incremental = _flag(body, "stream"), _flag(body, "incremental")
    if is_incremental and not stream:
        raise BadRequest("incremental is true, but without a stream there is one answer only: set stream to true")
    settings, seeds = _settings(body.get("sampling_params"), len(prompts))
    shares = _shares(settings, prompts, limits, stream=stream, is_incremental=is_incremental)
    counts = [share.num_samples for share in shares]
    total = sum(counts)
    if total > MAX_BATCH:
        raise BadRequest(f"one call may ask for {MAX_BATCH} responses, not {total}: send several calls")
    rids = read_rids(body.get("rid"), counts)
    members: list[sequences.Sequence] = []
    last, key = None, b""
    for prompt, share, first_seed in zip(prompts, shares, seeds, strict=True):
        if prompt is not last:
            last, key = prompt, prompt.tobytes()
        seed = _seed(first_seed)
        for sample in range(share.num_samples):
            index = len(members)
            sampling = share.sampling.with_seed((seed + sample) % 2**64)
            members.append(sequences.Sequence(rids[index], prompt, sampling, sink, index, key))
    return Call(
        sequences=tuple(members),
        stream=stream,
        return_logprob=_flag(body, "return_logprob"),
        batch=batch or total > 1,
        texts=texts,
        skip_special_tokens=all(share.skip_special_tokens for share in shares),
    )


def read_prompts(body: Json, limits: Limits) -> tuple[list[Tokens], bool, bool]:
    """(prompts, whether they came as a list, whether they came as text)."""
    if ("input_ids" in body) == ("text" in body):
        raise BadRequest("exactly one of input_ids and text must be given")
    texts = "text" in body
    value = body["text"] if texts else body["input_ids"]
    if texts:
        if limits.encode is None:
            raise BadRequest("text was given, but this server has no tokenizer: send input_ids")
        batch = isinstance(value, list)
        rows = value if batch else [value]
        if not rows or not all(isinstance(row, str) for row in rows):
            raise BadRequest("text must be a string or a list of strings")
        encoded = [limits.encode(row) for row in rows]
    else:
        if not isinstance(value, list) or not value:
            raise BadRequest("input_ids must be a list of token ids, or a list of such lists, and not empty")
        batch = isinstance(value[0], list)
        encoded = value if batch else [value]
    if len(encoded) > MAX_BATCH:
        raise BadRequest(f"one call may hold {MAX_BATCH} prompts, not {len(encoded)}: send several calls")
    return _token_arrays(encoded, limits), batch, texts


def _token_arrays(rows: Sequence[Any], limits: Limits) -> list[Tokens]:
    """Equal rows become one array, so that they share memory and prefill."""
    known: dict[tuple[int, ...], Tokens] = {}
    arrays: list[Tokens] = []
    last = None
    for row in rows:
        if row == last:
            arrays.append(arrays[-1])
            continue
        if not isinstance(row, list) or not row or not all(type(token) is int for token in row):
            raise BadRequest("a prompt must be a list of at least one token id (integers)")
        key = tuple(row)
        if key not in known:
            if min(row) < 0 or max(row) >= limits.vocab_size:
                raise BadRequest(
                    f"token ids must lie in [0, {limits.vocab_size}), and one is {min(row) if min(row) < 0 else max(row)}"
                )
            known[key] = np.asarray(row, np.int32)
        arrays.append(known[key])
        last = row
    return arrays


def _settings(value: Any, count: int) -> tuple[list[Json], list[Any]]:
    """Of each prompt its settings but for the seed, which is taken out of `value`, and the seed."""
    if not isinstance(value, list):
        value = {} if value is None else value
        if isinstance(value, dict):
            seed = value.pop("sampling_seed", None)
            return [value] * count, [seed] * count
    elif len(value) == count and all(isinstance(entry, dict) for entry in value):
        return value, [entry.pop("sampling_seed", None) for entry in value]
    raise BadRequest(f"sampling_params must be one object, or a list with one for each of the {count} prompts")


def _seed(value: Any) -> int:
    """Of a prompt's first sample; sample i > 0 draws from seed + i."""
    if value is None:
        return int.from_bytes(os.urandom(8), "little")
    if type(value) is not int:
        raise BadRequest(f"sampling_seed must be an integer, not {value!r}")
    return value


def _shares(
    settings: Sequence[Json], prompts: Sequence[Tokens], limits: Limits, *, stream: bool, is_incremental: bool
) -> list[_Share]:
    """One per prompt. The members of a group differ by their seeds, and are checked once."""
    shares: list[_Share] = []
    last: tuple[Json | None, int] = (None, 0)
    for params, prompt in zip(settings, prompts, strict=True):
        if last == (params, len(prompt)):
            shares.append(shares[-1])
            continue
        shares.append(
            _Share(
                _number(params, "n", int, 1, low=1, high=MAX_BATCH),
                _sampling(params, len(prompt), limits, stream=stream, is_incremental=is_incremental),
                _flag(params, "skip_special_tokens", True),
            )
        )
        last = (params, len(prompt))
    return shares


def _sampling(params: Json, prompt_tokens: int, limits: Limits, *, stream: bool, is_incremental: bool) -> Sampling:
    """All but the seed. Without a stream there is nothing to tell before the end."""
    _refuse_unknown(params, SAMPLING, OFF_SAMPLING, "sampling parameter")
    room = limits.context - prompt_tokens
    max_new = _number(params, "max_new_tokens", int, min(DEFAULT_MAX_NEW_TOKENS, max(room, 1)), low=1)
    if max_new > room:
        raise BadRequest(
            f"prompt and response must fit a context of {limits.context} tokens: the prompt has {prompt_tokens} and "
            f"max_new_tokens is {max_new}: shorten the prompt or ask for at most {max(room, 0)} tokens"
        )
    stops = params.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(type(stop) is int and 0 <= stop < limits.vocab_size for stop in stops):
        raise BadRequest(f"stop_token_ids must be a list of token ids in [0, {limits.vocab_size}), not {stops!r}")
    top_k = _number(params, "top_k", int, -1, low=-1)
    if top_k == 0:
        raise BadRequest("top_k must be -1 (off) or at least 1, not 0")
    top_p = _number(params, "top_p", float, 1.0, low=0, high=1)
    if top_p == 0:
        raise BadRequest("top_p must lie in (0, 1], not 0")
    interval = _number(params, "stream_interval", int, 1, low=1)
    offset = _number(params, "seed_offset", int, 0, low=0, high=prompt_tokens - 1)
    return Sampling(
        max_new_tokens=max_new,
        temperature=_number(params, "temperature", float, 1.0, low=0),
        top_p=top_p,
        top_k=min(top_k, limits.vocab_size),
        stop_token_ids=tuple(dict.fromkeys([*([] if _flag(params, "ignore_eos") else limits.eos_token_ids), *stops])),
        seed_offset=offset,
        stream_interval=min(interval, limits.context) if stream else None,
        is_incremental=is_incremental,
    )


def read_rids(value: Any, counts: Sequence[int]) -> list[str]:
    """One id per response: those given, suffixed where one prompt has several responses."""
    total = sum(counts)
    if value is None:
        return [os.urandom(16).hex() for _ in range(total)]
    if isinstance(value, str):
        return [value] * total
    if not isinstance(value, list) or not all(isinstance(rid, str) for rid in value) or len(value) not in (len(counts), total):
        raise BadRequest(f"rid must be a string, or a list of {len(counts)} strings, one per prompt")
    if len(value) == total:
        return value
    return [rid for rid, count in zip(value, counts, strict=True) for _ in range(count)]


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], off: Json, kind: str) -> None:
    for name, value in given.items():
        if name in known or value is None or (name in off and value == off[name]):
            continue
        if name in off:
            raise BadRequest(f"the {kind} {name} is {value!r}, which this engine does not act on: leave it at {off[name]!r}")
        raise BadRequest(f"unknown {kind} {name!r}: this engine knows {', '.join(known)}")


def _number(params: Json, name: str, kind: type, default: Any, *, low: float, high: float = float("inf")) -> Any:
    value = params.get(name)
    if value is None:
        return default
    right = type(value) is int or (kind is float and type(value) is float)
    if not right or not low <= value <= high or value == float("inf"):
        span = f"at least {low}" if high == float("inf") else f"in [{low}, {high}]"
        raise BadRequest(f"{name} must be {'an integer' if kind is int else 'a number'} {span}, not {value!r}")
    return kind(value)


def _flag(params: Json, name: str, default: bool = False) -> bool:
    value = params.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {value!r}")
    return value


def response_of(update: Update, call: Call, decode: Callable[[Sequence[int], bool], str] | None) -> Json:
    """One response object. An incremental one holds the last of `completion_tokens`; `weight_versions` count from the first."""
    sequence, ids = update.sequence, update.token_ids.tolist()
    meta: Json = {
        "id": sequence.rid,
        "finish_reason": _finish_reason(update),
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": update.num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": update.spans[-1][0],
        "weight_versions": _versions(update),
    }
    if call.return_logprob:
        meta["output_token_logprobs"] = [
            [log_prob, token, None] for log_prob, token in zip(update.log_probs.tolist(), ids, strict=True)
        ]
    response: Json = {"output_ids": ids, "meta_info": meta, "index": sequence.index}
    if call.texts and decode is not None:
        response["text"] = decode(ids, call.skip_special_tokens)
    return response


def _finish_reason(update: Update) -> Json | None:
    finish = update.finish
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": update.num_tokens}
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": finish.message, **({"status_code": finish.status} if finish.status else {})}


def _versions(update: Update) -> list[Json]:
    """[start, end) of each version over the output tokens; empty ones are left out."""
    versions: list[Json] = []
    end = update.num_tokens
    for version, start in reversed(update.spans):
        if start < end:
            versions.append({"version": version, "start": start, "end": end})
        end = start
    versions.reverse()
    return versions
