"""The model and its cache: prefill, one decode step, slot copies, and the exchange of weights.

Shapes: N sequences, Q tokens of a prefill chunk, L tokens attended to (the longest, rounded up), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.engines.embedded.invariant import InvariantForward, kv_columns
from asyncrl.engines.embedded.kv_cache import LayerShape, SlotCache
from asyncrl.engines.embedded.lean import FAMILY, LeanForward
from asyncrl.engines.embedded.loading import context_limit, refuse_short_window
from asyncrl.engines.embedded.sampling import sample
from asyncrl.engines.embedded.scoring import token_log_probs
from asyncrl.errors import PlanMismatch, UserError

PREFILL_CHUNK = 512
PREFILL_TOKENS = 2048
LENGTH_BUCKET = 16
Layout = tuple[tuple[int, ...], torch.dtype, str, tuple[int, ...]]
"""Shape, dtype, kind of device and stride of a parameter: what an exchange of weights leaves as it is."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class ModelRunner:
    """Everything that touches tensors. One thread calls it: the engine's loop (`live` excepted).

    `batch_invariant`: a sequence's numbers depend on its own tokens only, bit for bit (see `invariant`). Raises UserError for a
    model or a context that cannot be served, or not so.
    """

    def __init__(self, model: Any, *, max_slots: int, context: int, batch_invariant: bool = False):
        limit = context_limit(model.config)
        if limit is not None and context > limit:
            raise UserError(
                f"a context of {context} tokens is asked for, and the model has room for {limit}: lower "
                "rollout.max_prompt_tokens or rollout.max_response_tokens (or inference.context_tokens)"
            )
        refuse_short_window(model.config, context)
        self.model, self.context, self.max_slots = model, context, max_slots
        self._parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self._layouts = {name: _layout(parameter) for name, parameter in self._parameters.items()}
        parameter = next(iter(self._parameters.values()))
        self.dtype, self.device = parameter.dtype, parameter.device
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self._all_columns = torch.arange(context, device=self.device)
        self._lean: LeanForward | None = None
        self._invariant: InvariantForward | None = None
        try:
            shapes, columns = _layer_shapes(model, self._cache_name), kv_columns(context)
            self.cache = SlotCache(shapes, max_slots=max_slots, context=columns, dtype=self.dtype, device=self.device)
            if batch_invariant:
                self._invariant = self._checked_invariant()
            else:
                self._choose_forward()
        except UserError:
            raise
        except Exception as error:  # boundary: a foreign model's code, which may dislike our cache or masks in any way
            raise self._cannot_serve(f"it does not take keys, values and masks from outside ({error})") from error

    @property
    def batch_invariant(self) -> bool:
        return self._invariant is not None

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], tokens: Sequence[npt.NDArray[np.int32]]) -> None:
        """Compute and store the keys and values of tokens[i] in slots[i], from position 0.

        Rows of similar length go together, padded on the right: what padding writes lies past a row's length, where nothing
        is read before it has been written again.
        """
        if self._invariant is not None:
            self._invariant.prefill(slots, tokens, self.cache)
            return
        order = sorted((index for index in range(len(slots)) if len(tokens[index])), key=lambda index: len(tokens[index]))
        while order:
            longest = len(tokens[order[-1]])
            part = [order.pop()]
            while order and (len(part) + 1) * longest <= PREFILL_TOKENS and 2 * len(tokens[order[-1]]) >= longest:
                part.append(order.pop())
            padded = np.zeros((len(part), longest), np.int64)
            for row, index in enumerate(part):
                padded[row, : len(tokens[index])] = tokens[index]
            rows_N = torch.tensor([slots[index] for index in part], device=self.device)
            self._prefill_padded(rows_N, self._to_device(padded))

    def _prefill_padded(self, rows_N: torch.Tensor, tokens_NT: torch.Tensor) -> None:
        """Chunk by chunk, so that no mask is larger than PREFILL_CHUNK × length."""
        length = tokens_NT.shape[1]
        for start in range(0, length, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, length)
            columns = self._all_columns[start:end]
            mask = _additive(self._all_columns[:end] <= columns[:, None], self.dtype)[None, None]
            self.cache.target_prefill(rows_N, start, end)
            self._forward(tokens_NT[:, start:end], columns.expand(len(rows_N), -1), mask)

    @torch.inference_mode()
    def decode(
        self,
        tokens: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        *,
        temperature: npt.NDArray[np.float32],
        uniform: npt.NDArray[np.float64],
        top_p: npt.NDArray[np.float32] | None = None,
        top_k: npt.NDArray[np.int64] | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Feed tokens[i] at position lengths[i] of slot i; the sampled tokens int32[N] and their log-probs float32[N]."""
        picked: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        for rows, logits_RV in self._passes(tokens, lengths):
            fill = partial(_filled, length=len(logits_RV))
            picked_R, log_probs_R = sample(
                logits_RV,
                self._to_device(fill(temperature[rows], off=1)),
                self._to_device(fill(uniform[rows], off=0)),
                top_p_N=None if top_p is None else self._to_device(fill(top_p[rows], off=1)),
                top_k_N=None if top_k is None else self._to_device(fill(top_k[rows], off=-1)),
            )
            picked.append(picked_R[: rows.stop - rows.start])
            log_probs.append(log_probs_R[: rows.stop - rows.start])
        return torch.cat(picked).int().cpu().numpy(), torch.cat(log_probs).cpu().numpy()

    @torch.inference_mode()
    def next_logits(self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        """float32[N, V]: one step of the slots 0 … N−1."""
        return torch.cat([logits_RV[: rows.stop - rows.start] for rows, logits_RV in self._passes(tokens, lengths)])

    def _passes(self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> Iterable[tuple[slice, torch.Tensor]]:
        """(rows, their logits) of one step. A batch-invariant pass has more logits than rows, and then several passes may be."""
        if self._invariant is not None:
            return self._invariant.decode(tokens, lengths, self.cache)
        return [(slice(0, len(tokens)), self._decode_all(tokens, lengths))]

    def _decode_all(self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        longest = min(-(-(int(lengths.max()) + 1) // LENGTH_BUCKET) * LENGTH_BUCKET, self.context)
        positions_N = self._to_device(lengths)
        mask = _additive(self._all_columns[:longest] <= positions_N[:, None], self.dtype)[:, None, None]
        self.cache.target_decode(positions_N, longest)
        return self._forward(self._to_device(tokens).long()[:, None], positions_N[:, None], mask)[:, -1].float()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[N, 1 or Q, V], the last row being each sequence's next token."""
        if self._lean is not None:
            return self._lean(ids, positions, mask, self.cache)
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: self.cache},
            **self._last_only,
        ).logits

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _choose_forward(self) -> None:
        """The lean forward pass where it agrees with the model, else transformers'. Raises UserError if that disagrees too:
        then the architecture keeps state that this engine does not know of."""
        self._lean = LeanForward.of(self.model, self.context)
        error = self._decode_error()
        if self._lean is not None and not error <= TOLERANCE[self.dtype]:
            self._lean = None
            error = self._decode_error()
        if not error <= TOLERANCE[self.dtype]:
            raise self._cannot_serve(f"its decoding differs from its own forward pass by {error:.2g} in log-probability")

    def _checked_invariant(self) -> InvariantForward:
        """The batch-invariant pass, where it agrees with the model and with itself: once over whole prompts in company, once
        token by token alone. Raises UserError."""
        self._invariant = InvariantForward.of(self.model, self.context)
        if self._invariant is None:
            raise self._not_invariant(
                f"only models of the Llama family ({', '.join(FAMILY)}) with fixed rotary frequencies can be"
            )
        error = self._decode_error()
        if not error <= TOLERANCE[self.dtype]:
            raise self._not_invariant(f"its log-probabilities would differ from the model's own by {error:.2g}")
        length, company = min(24, self.context - 1), min(3, self.max_slots)
        ids = (np.arange(company * (length + 1), dtype=np.int32) * 13 + 5).reshape(company, -1) % min(self.vocab_size, 1000)
        self.prefill(range(company), [row[:length] for row in ids])
        together_V = self.next_logits(ids[:, length], np.full(company, length))[company - 1]
        for position, token in enumerate(ids[company - 1]):
            alone_V = self.next_logits(token[None], np.asarray([position]))[0]
        if not torch.equal(together_V, alone_V):
            raise self._not_invariant(f"a prompt in company has other logits than alone on this device ({self.device})")
        return self._invariant

    def _not_invariant(self, reason: str) -> UserError:
        name = type(self.model).__name__
        return UserError(f"{name} cannot be served batch-invariantly: {reason}: set inference.batch_invariant to auto or never")

    def _cannot_serve(self, reason: str) -> UserError:
        name = type(self.model).__name__
        return UserError(f"the embedded engine cannot serve {name}: {reason}: use another model, or inference.engine: sglang")

    def _decode_error(self) -> float:
        """The largest difference in log-probability between a step through the cache and one plain forward pass."""
        length = min(12, self.context - 1)
        ids = (np.arange(length + 1, dtype=np.int32) * 7 + 3) % min(self.vocab_size, 1000)
        self.prefill([0], [ids[:length]])
        ours_V = self.next_logits(ids[length:], np.asarray([length]))[0]
        with torch.inference_mode():
            theirs_V = self.model(input_ids=self._to_device(ids).long()[None], use_cache=False).logits[0, -1].float()
        return float((ours_V.log_softmax(-1) - theirs_V.log_softmax(-1)).abs().max())

    def score(self, rows: Sequence[npt.NDArray[np.int32]], temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probs float32[P − 1] of each row's tokens but the first; the cache is left as it is."""
        return token_log_probs(self.model, rows, temperature)

    def live(self) -> dict[str, torch.Tensor]:
        """Parameters by name; a tied one once, under its first name. Callable from any thread."""
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def exchange(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Swap the memory of parameters and staged tensors. All or nothing: raises PlanMismatch before the first swap."""
        check_staged(self._layouts, staged)
        for name, parameter in self._parameters.items():
            fresh = staged[name]
            fresh.data, parameter.data = parameter.data, fresh.data


def check_staged(layouts: Mapping[str, Layout], staged: Mapping[str, torch.Tensor]) -> None:
    """Raises PlanMismatch unless the staged tensors are the live ones in name, shape, dtype, device and layout."""
    different = sorted(layouts.keys() ^ staged.keys())
    if different:
        raise PlanMismatch(f"staged and live parameters differ in names: {', '.join(different[:5])}")
    for name, mine in layouts.items():
        theirs = _layout(staged[name])
        if mine != theirs:
            raise PlanMismatch(f"parameter {name} is {mine}, and the staged tensor is {theirs} (shape, dtype, device, stride)")


def _layout(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.stride()


def _filled(values: npt.NDArray[Any], *, length: int, off: float) -> npt.NDArray[Any]:
    """Padded to `length` by the value that switches a setting off."""
    return np.pad(values, (0, length - len(values)), constant_values=off) if len(values) < length else values


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, −∞ elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


@torch.inference_mode()
def _layer_shapes(model: Any, cache_name: str) -> list[LayerShape]:
    """What each layer stores per token, read off the cache that the model fills itself."""
    ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    filled = getattr(model(input_ids=ids, use_cache=True), cache_name)
    shapes: list[LayerShape] = []
    for number, layer in enumerate(filled.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            raise UserError(
                f"the embedded engine keeps keys and values only; layer {number} of {type(model).__name__} keeps another state "
                f"({type(layer).__name__}): use inference.engine: sglang"
            )
        shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    return shapes
