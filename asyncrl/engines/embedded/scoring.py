"""Log-probs of given tokens, without generating any: one plain forward pass over whole sequences, in a few batches.

Shapes: N sequences, T tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BATCH_TOKENS = 2048
"""Of one forward pass, padding included; a longer sequence goes alone."""


@torch.inference_mode()
def token_log_probs(model: Any, rows: Sequence[npt.NDArray[np.int32]], temperature: float) -> list[npt.NDArray[np.float32]]:
    """float32[P − 1] for each row of P tokens: of every token but the first, under the distribution scaled by `temperature`."""
    found: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(rows)
    device = next(model.parameters()).device
    for chosen in _batches(rows):
        lengths = [len(rows[index]) for index in chosen]
        padded = np.zeros((len(chosen), max(lengths)), np.int64)
        for place, index in enumerate(chosen):
            padded[place, : lengths[place]] = rows[index]
        tokens_NT = torch.from_numpy(padded).to(device)  # padded on the right, where nothing before it looks
        logits_NTV = model(input_ids=tokens_NT, use_cache=False).logits[:, :-1].float() / temperature
        log_probs_NT = logits_NTV.log_softmax(-1).gather(-1, tokens_NT[:, 1:, None])[..., 0].cpu().numpy()
        for place, index in enumerate(chosen):
            found[index] = log_probs_NT[place, : lengths[place] - 1].copy()
    return found


def _batches(rows: Sequence[npt.NDArray[np.int32]]) -> Iterator[list[int]]:
    """Rows of similar length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
    while order:
        count = max(1, BATCH_TOKENS // len(rows[order[0]]))
        yield order[:count]
        order = order[count:]
