"""Before anything is trained: do servers and trainer compute the same log-probs for the same tokens?

    as loaded                  server and trainer hold the model's own weights        (a run's first start)
    after the first version    the server holds what the trainer published

A difference beyond what the precision explains ends the run, with the likeliest cause.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.algorithms.agreement import Gap, likely_cause
from asyncrl.errors import RunError
from asyncrl.messages import ScoredGroup
from asyncrl.protocols import TrainBatch
from asyncrl.services.trainer.ranks import Ranks

log = logging.getLogger(__name__)
TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)  # at which a server may sample by mistake


async def self_test(
    ranks: Ranks, probes: Mapping[str, Sequence[ScoredGroup]], *, when: str, dtype: str, temperature: float
) -> dict[str, float]:
    """Compare every server's answers with the trainer's own judgement of them. Returns figures by flat names; raises RunError."""
    figures = {}
    for name, groups in probes.items():
        batch = TrainBatch(0, 0, 0.0, tuple(groups), (tuple(range(len(groups))),))
        served_N = np.concatenate([group.log_probs for group in groups])
        trained_N = await ranks.judge(batch, temperature)
        gap = Gap.of(served_N, trained_N)
        figures[f"self_test/{name}/log_prob_gap"] = gap.mean
        log.info("self-test %s: log-probs of %s and the trainer differ by %.2g (at most %.2g)", when, name, gap.mean, gap.largest)
        if gap.is_within(dtype):
            continue
        others = {value: await ranks.judge(batch, value) for value in TEMPERATURES}
        cause = likely_cause(
            served_N,
            trained_N,
            dtype=dtype,
            temperature=temperature,
            by_temperature=others,
            rounded_N=await ranks.judge(batch, temperature, rounded=True),
        )
        raise RunError(
            f"self-test {when}: log-probs of {name} and the trainer differ by {gap.mean:.2g} on average and {gap.largest:.2g} at "
            f"most, over {gap.tokens} tokens. Likely cause: {cause}"
        )
    return figures
