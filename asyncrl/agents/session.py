"""A session: one member's conversation with the policy, recorded token by token.

    prompt │ reply 1 │ environment │ reply 2 │ …
    ───────┼─────────┴─────────────┴─────────┴──▶ response_tokens
    mask   │  True   │    False    │  True   │

The policy's tokens carry the log-prob and version that the server reported; what an environment adds between two replies carries
neither (mask False, log-prob 0, the version of the reply before it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.agents.task import Task, pause_before_retry, seed_of
from asyncrl.errors import AsyncrlError, GenerationFailed
from asyncrl.messages import FinishReason, Trajectory
from asyncrl.messages.plain import plain
from asyncrl.protocols import Completion, GenerateRequest, InferenceEngine, MemberRequest, SamplingParams, Tokenizer


class Session:
    """What an agent of the user's own is given. One session per member; calls follow one another."""

    def __init__(self, task: Task, member: int, engine: InferenceEngine, tokenizer: Tokenizer, active: set[str]):
        self._task, self.member = task, member
        self._engine, self._tokenizer, self._active = engine, tokenizer, active
        self._prompt_tokens: list[int] | None = None
        self._response: list[int] = []
        self._mask: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._turns = 0
        self._is_generating = self._is_closed = False
        self._last_reply = ""
        self._messages: list[Any] = []
        self.finish_reason: FinishReason = "stop"
        """Why the last reply ended: stop or length."""

    @property
    def tokens(self) -> list[int]:
        """Everything so far: prompt, replies, and what stood between them. Empty before the first reply."""
        return [*(self._prompt_tokens or []), *self._response]

    @property
    def room(self) -> int:
        """Tokens that the trajectory still has room for, replies and environment together (rollout.max_response_tokens)."""
        return self._task.max_response_tokens - len(self._response)

    def encode(self, text_or_messages: str | list[dict[str, Any]]) -> list[int]:
        """Token ids as `generate` would make them."""
        return self._tokenizer.encode_prompt(text_or_messages)

    async def generate(self, prompt: str | list[dict[str, Any]] | Sequence[int], *, max_new_tokens: int | None = None) -> str:
        """The policy's reply to text, chat messages or token ids, recorded in the trajectory.

        The first call's tokens are the prompt. Those of a later call must begin with `tokens`, exactly; what comes after is
        recorded as the environment's. Text and messages are encoded anew, which need not give the tokens that were sampled (a
        tokenizer may merge them differently): then pass ids, ``session.tokens + session.encode(...)``.

        Raises GenerationFailed: the server failed more than rollout.generation_retries times, the tokens do not extend the
        conversation, it has no room left, or another call of this session is not done yet.
        """
        if self._is_closed:
            raise GenerationFailed("this session is over: its trajectory was handed over")
        if self._is_generating:
            raise GenerationFailed("a session has one conversation: await one session.generate before the next")
        self._is_generating = True
        try:
            return await self._reply(prompt, max_new_tokens)
        finally:
            self._is_generating = False

    async def _reply(self, prompt: str | list[dict[str, Any]] | Sequence[int], max_new_tokens: int | None) -> str:
        is_ids = not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], dict))
        ids = [int(token) for token in prompt] if is_ids else self.encode(prompt)  # type: ignore[arg-type]
        environment = self._environment(ids)
        room = self.room - len(environment)
        wanted = min(room, max_new_tokens or self._task.sampling.max_new_tokens)
        if wanted < 1:
            raise GenerationFailed(
                f"turn {self._turns + 1}: the conversation has {len(self._response)} response tokens and {len(environment)} new "
                f"ones, and rollout.max_response_tokens is {self._task.max_response_tokens}: raise it, or end the conversation "
                "(session.room)"
            )
        completion = await self._ask(ids, wanted)
        if self._prompt_tokens is None:
            self._prompt_tokens = ids
        else:
            self._append(
                environment, [False] * len(environment), [0.0] * len(environment), [self._versions[-1]] * len(environment)
            )
        replied = completion.token_ids.tolist()
        self._append(replied, [True] * len(replied), completion.log_probs.tolist(), completion.versions.tolist())
        self._turns += 1
        self.finish_reason = completion.finish_reason
        self._last_reply = self._tokenizer.decode(replied)
        if not is_ids and not isinstance(prompt, str):
            self._messages = [*plain(list(prompt), "messages"), {"role": "assistant", "content": self._last_reply}]
        return self._last_reply

    def close(self) -> None:
        """No reply from now on."""
        self._is_closed = True

    def trajectory(self, extra_info: dict[str, Any], seconds: float) -> Trajectory:
        """What was recorded. `response` is the last reply. Raises GenerationFailed when the agent never asked for one."""
        if self._prompt_tokens is None:
            raise GenerationFailed("the agent returned without a call of session.generate: it must ask for at least one reply")
        prompt = self._task.prompt
        return Trajectory(
            id=self._task.id.member(self.member),
            group_size=self._task.group_size,
            start_version=self._task.start_version,
            prompt_tokens=np.asarray(self._prompt_tokens, np.int32),
            response_tokens=np.asarray(self._response, np.int32),
            loss_mask=np.asarray(self._mask, np.bool_),
            log_probs=np.asarray(self._log_probs, np.float32),
            versions=np.asarray(self._versions, np.int32),
            finish_reason=self.finish_reason,
            prompt=prompt.prompt,
            response=self._last_reply,
            ground_truth=prompt.ground_truth,
            extra_info=extra_info,
            messages=self._messages,
            generate_seconds=seconds,
        )

    def _environment(self, ids: list[int]) -> list[int]:
        """The tokens of `ids` past the conversation so far."""
        if not ids:
            raise GenerationFailed(f"turn {self._turns + 1}: the prompt has no token")
        if self._prompt_tokens is None:
            return []
        earlier = self.tokens
        if ids[: len(earlier)] != earlier:
            pairs = zip(ids, earlier, strict=False)
            at = next((index for index, (new, old) in enumerate(pairs) if new != old), min(len(ids), len(earlier)))
            raise GenerationFailed(
                f"turn {self._turns + 1}: the prompt's tokens do not extend the conversation's, they part at token {at} of "
                f"{len(earlier)}: pass ids, session.tokens + session.encode(...)"
            )
        return ids[len(earlier) :]

    async def _ask(self, ids: list[int], max_new_tokens: int) -> Completion:
        task, failure = self._task, "no answer"
        sampling = SamplingParams(**{**vars(task.sampling), "max_new_tokens": max_new_tokens})
        seed = seed_of(task.run_seed, *task.id, self.member, *([self._turns] if self._turns else []))
        for tried in range(task.retries + 1):
            if tried:
                await pause_before_retry(tried)
            rid = f"{task.rid_prefix}{task.id}/{self.member}:{self._turns}.{tried}"
            request = GenerateRequest(
                np.asarray(ids, np.int32),
                (MemberRequest(self.member, rid, seed),),
                sampling,
                task.timeout_seconds,
                conversation=f"{task.id}/{self.member}",
            )
            self._active.add(rid)
            try:
                found: Completion | None = None
                async for completions in self._engine.generate(request):
                    found = completions[-1]
                if found is not None and found.failure is None:
                    return found
                failure = failure if found is None or found.failure is None else found.failure
            except AsyncrlError as error:
                failure = f"{type(error).__name__}: {error}"
            finally:
                self._active.discard(rid)
        raise GenerationFailed(f"turn {self._turns + 1}: generation failed {task.retries + 1} times: {failure}")

    def _append(self, tokens: list[int], mask: list[bool], log_probs: list[float], versions: list[int]) -> None:
        self._response += tokens
        self._mask += mask
        self._log_probs += log_probs
        self._versions += versions
