"""Responses to fixed prompts, by which two parties can compare what they compute; and fixed texts, for their tokenizers."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from asyncrl.engines.client import FleetClient, fixed_fleet
from asyncrl.errors import RunError
from asyncrl.messages import GroupId, ScoredGroup
from asyncrl.protocols import Completion, GenerateRequest, MemberRequest, SamplingParams, Tokenizer

PROMPTS, PROMPT_TOKENS, MEMBERS, RESPONSE_TOKENS = 4, 8, 4, 8
SECONDS = 120.0  # a server's first request may compile
TEXTS = (
    "3+4+5=",
    "the quick brown fox",
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\tand\nlines\n\n",
    "def f(x: int) -> int:\n    return x**2  # 10,000.5 €",
    "Ünïcödé, 日本語 and 🙂",
)


def vocabulary_of(path: str | Path, *, trust_remote_code: bool = False) -> int:
    """Tokens that the model at `path` knows."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config().vocab_size)


async def probe(
    name: str, url: str, *, token: str | None, is_embedded: bool, temperature: float, vocabulary: int, context_tokens: int
) -> list[ScoredGroup]:
    """What the server at `url` answers to fixed prompts of token ids, as groups that nobody has rewarded. Raises RunError where
    it gives no usable answer."""
    client = FleetClient(fixed_fleet({name: url}), is_embedded=is_embedded, token=token)
    try:
        return [await _group(client, name, number, temperature, vocabulary, context_tokens) for number in range(PROMPTS)]
    finally:
        await client.close()


async def _group(
    client: FleetClient, name: str, number: int, temperature: float, vocabulary: int, context_tokens: int
) -> ScoredGroup:
    length = max(1, min(PROMPT_TOKENS, context_tokens // 2))
    prompt = ((np.arange(length) * 7919 + number * 104_729 + 11) % vocabulary).astype(np.int32)
    members = tuple(MemberRequest(index, f"probe-{secrets.token_hex(4)}-{index}", index) for index in range(MEMBERS))
    sampling = SamplingParams(
        max_new_tokens=max(1, min(RESPONSE_TOKENS, context_tokens - length)), temperature=temperature, ignore_eos=True
    )
    request = GenerateRequest(prompt, members, sampling, timeout_seconds=SECONDS)
    answers = sorted(
        [completion async for part in client.generate(request) for completion in part], key=lambda completion: completion.index
    )
    failure = next((answer.failure for answer in answers if answer.failure is not None), None)
    if failure is not None:
        raise RunError(f"self-test: {name} does not answer a fixed prompt ({failure}): see its log")
    return _as_group(number, prompt, answers)


def _as_group(number: int, prompt: np.ndarray, answers: list[Completion]) -> ScoredGroup:
    tokens = np.concatenate([answer.token_ids for answer in answers])
    return ScoredGroup(
        id=GroupId(0, number, 1),
        group_size=len(answers),
        start_version=0,
        prompt_tokens=prompt,
        members=np.arange(len(answers), dtype=np.int32),
        lengths=np.asarray([len(answer.token_ids) for answer in answers], np.int32),
        response_tokens=tokens,
        loss_mask=np.ones(len(tokens), np.bool_),
        log_probs=np.concatenate([answer.log_probs for answer in answers]),
        versions=np.concatenate([answer.versions for answer in answers]),
        rewards=np.zeros(len(answers), np.float32),
        components={},
        finish_reasons=[answer.finish_reason for answer in answers],
        failures=[None] * len(answers),
        prompt="",
        responses=[""] * len(answers),
    )


async def check_tokenizer(name: str, url: str, *, token: str | None, tokenizer: Tokenizer) -> None:
    """Raise RunError where the server's tokenizer makes other tokens of a text, or another text of tokens, than the run's. Texts
    that the run's cannot represent tell nothing, and are left out."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for text in TEXTS:
                ours = tokenizer.encode_prompt(text)
                if tokenizer.decode(ours) != text:
                    continue
                theirs = (await _post(session, f"{url}/tokenize", {"prompt": text}))["tokens"]
                if theirs != ours:
                    raise _differs(name, f"{text!r} is {ours[:12]} here and {theirs[:12]} there")
                told = (await _post(session, f"{url}/detokenize", {"tokens": ours, "skip_special_tokens": True}))["text"]
                if told != tokenizer.decode(ours):
                    raise _differs(name, f"tokens {ours[:12]} are {tokenizer.decode(ours)!r} here and {told!r} there")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"self-test: {name} does not say how it tokenizes ({error or type(error).__name__}): see its log"
        ) from error


def _differs(name: str, what: str) -> RunError:
    return RunError(
        f"self-test: the tokenizer of {name} is not the run's: {what}. Serve the model with the tokenizer of model.path "
        "(or model.tokenizer)"
    )


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as answer:
        answer.raise_for_status()
        return dict(await answer.json())
