"""SGLang's /generate that generates nothing: log-probs of the prompt's own tokens, from `logprob_start_len` on.

    {"input_ids": [[…], …], "sampling_params": {"max_new_tokens": 0, "temperature": T}, "return_logprob": true,
     "logprob_start_len": [s, …]}  ─▶  meta_info.input_token_logprobs = [[null, id], [log-prob, id], …] of the tokens s, s + 1, …

As in SGLang the first has no log-prob. Unlike there, log-probs are those at `temperature`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.engines.embedded.wire import BadRequest, Limits, read_prompts, read_rids

FIELDS = ("input_ids", "text", "sampling_params", "return_logprob", "logprob_start_len", "rid", "stream", "extra_key")
Json = dict[str, Any]


@dataclass(frozen=True)
class ScoreCall:
    """rows: int32[P] each; starts: from which token on. `batch`: the response is a list."""

    rows: list[npt.NDArray[np.int32]]
    starts: list[int]
    rids: list[str]
    temperature: float
    batch: bool


def is_scoring(body: Any) -> bool:
    """Whether a request asks for log-probs of its prompt, and not for a response."""
    return isinstance(body, dict) and body.get("logprob_start_len") not in (None, -1)


def parse_score(body: Json, limits: Limits) -> ScoreCall:
    """Raises BadRequest, which names the field, its value and the remedy."""
    if unknown := [name for name in body if name not in FIELDS]:
        raise BadRequest(f"unknown field {unknown[0]!r} beside logprob_start_len: this engine knows {', '.join(FIELDS)}")
    if body.get("return_logprob") is not True or body.get("stream"):
        raise BadRequest("logprob_start_len asks for log-probs of the prompt: set return_logprob to true, and stream to false")
    rows, batch, _ = read_prompts(body, limits)
    longest = max(map(len, rows))
    if longest > limits.context:
        raise BadRequest(f"a prompt has {longest} tokens, and the context is {limits.context}: shorten it")
    starts, rids = _starts(body["logprob_start_len"], rows), read_rids(body.get("rid"), [1] * len(rows))
    return ScoreCall(rows, starts, rids, _temperature(body), batch)


def _starts(value: Any, rows: list[npt.NDArray[np.int32]]) -> list[int]:
    starts = value if isinstance(value, list) else [value] * len(rows)
    right = len(starts) == len(rows) and all(
        type(start) is int and 0 <= start < len(row) for start, row in zip(starts, rows, strict=False)
    )
    if not right:
        raise BadRequest(f"logprob_start_len must be a token's place in its prompt, or a list of one each, not {value!r:.80}")
    return starts


def _temperature(body: Json) -> float:
    params = body.get("sampling_params") or {}
    known = isinstance(params, dict) and set(params) <= {"max_new_tokens", "temperature"}
    if not known or params.get("max_new_tokens") != 0:
        raise BadRequest(
            "with logprob_start_len this engine generates nothing: sampling_params must be one object of max_new_tokens 0 and "
            "temperature"
        )
    temperature = params.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not 0 < temperature < float("inf"):
        raise BadRequest(f"temperature must be a number above 0 where log-probs are asked for, not {temperature!r}")
    return float(temperature)


def score_responses(call: ScoreCall, log_probs: list[npt.NDArray[np.float32]], version: str) -> Any:
    """The answer: one object, or a list. log_probs: of every token but the first."""
    answers = [_response(*values, version) for values in zip(call.rids, call.rows, call.starts, log_probs, strict=True)]
    return answers if call.batch else answers[0]


def _response(rid: str, row: npt.NDArray[np.int32], start: int, log_probs: npt.NDArray[np.float32], version: str) -> Json:
    values = [None, *log_probs[start:].tolist()]
    meta: Json = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(row),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": version,
        "weight_versions": [],
        "input_token_logprobs": [[value, token, None] for value, token in zip(values, row[start:].tolist(), strict=True)],
        "output_token_logprobs": [],
    }
    return {"output_ids": [], "meta_info": meta}
