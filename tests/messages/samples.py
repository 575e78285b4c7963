"""Messages for tests: plain ones by hand, and hypothesis strategies for every shape a message may have."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl.messages import GreedyResponse, GroupId, ScoredGroup, Trajectory, TrajectoryId


def trajectory(row: int = 0, member: int = 0, *, num_tokens: int = 8, group_size: int = 8, attempt: int = 0) -> Trajectory:
    """A finished trajectory of `num_tokens` response tokens."""
    return Trajectory(
        id=TrajectoryId(0, row, attempt, member),
        group_size=group_size,
        start_version=0,
        prompt_tokens=np.arange(4, dtype=np.int32),
        response_tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        log_probs=np.full(num_tokens, -0.5, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        finish_reason="stop",
        prompt="1+2=",
        response="3",
        ground_truth="3",
    )


def scored_group(row: int = 0, *, lengths: tuple[int, ...] = (3, 5)) -> ScoredGroup:
    """A closed group, one member per length."""
    total, count = sum(lengths), len(lengths)
    return ScoredGroup(
        id=GroupId(0, row, 0),
        group_size=max(count, 1),
        start_version=0,
        prompt_tokens=np.arange(4, dtype=np.int32),
        members=np.arange(count, dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        response_tokens=np.arange(total, dtype=np.int32),
        loss_mask=np.ones(total, dtype=np.bool_),
        log_probs=np.full(total, -0.5, dtype=np.float32),
        versions=np.zeros(total, dtype=np.int32),
        rewards=np.ones(count, dtype=np.float32),
        components={"exact_match": np.ones(count, dtype=np.float32)},
        finish_reasons=["stop"] * count,
        failures=[None] * count,
        prompt="1+2=",
        responses=["3"] * count,
        ground_truth="3",
    )


counts = st.integers(0, 2**40)
texts = st.text(st.characters(), max_size=20)  # lone surrogates included
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
plain_lists = st.lists(plain_values, max_size=3)


def arrays(dtype: Any, size: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, size)


def token_arrays(size: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "response_tokens": arrays(np.int32, size),
            "loss_mask": arrays(np.bool_, size),
            "log_probs": arrays(np.float32, size),
            "versions": arrays(np.int32, size),
        }
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    group_size = draw(st.integers(1, 100))
    failure = draw(st.none() | texts)
    size = 0 if failure is not None else draw(st.integers(0, 20))
    return Trajectory(
        id=TrajectoryId(draw(counts), draw(counts), draw(counts), draw(st.integers(0, group_size))),
        group_size=group_size,
        start_version=draw(counts),
        prompt_tokens=draw(arrays(np.int32, draw(st.integers(0, 10)))),
        **draw(token_arrays(size)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "failed"])),
        prompt=draw(texts | plain_lists),
        response=draw(texts),
        ground_truth=draw(plain_values),
        extra_info=draw(st.dictionaries(texts, plain_values, max_size=3)),
        messages=draw(plain_lists),
        tool_calls=draw(plain_lists),
        generate_seconds=draw(st.floats(0, 1e6)),
        failure=failure,
    )


@st.composite
def scored_groups(draw: st.DrawFn) -> ScoredGroup:
    group_size = draw(st.integers(1, 12))
    members = sorted(draw(st.sets(st.integers(0, group_size - 1))))
    num = len(members)
    lengths = draw(st.lists(st.integers(0, 5), min_size=num, max_size=num))
    failures = draw(st.lists(st.none() | texts, min_size=num, max_size=num))
    names = draw(st.lists(texts, max_size=3, unique=True))
    return ScoredGroup(
        id=GroupId(draw(counts), draw(counts), draw(counts)),
        group_size=group_size,
        start_version=draw(counts),
        prompt_tokens=draw(arrays(np.int32, draw(st.integers(0, 10)))),
        members=np.array(members, dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        **draw(token_arrays(sum(lengths))),
        rewards=np.array([1.0 if failure is None else np.nan for failure in failures], dtype=np.float32),
        components={name: draw(arrays(np.float32, num)) for name in names},
        finish_reasons=draw(st.lists(texts, min_size=num, max_size=num)),
        failures=failures,
        prompt=draw(texts | plain_lists),
        responses=draw(st.lists(texts, min_size=num, max_size=num)),
        ground_truth=draw(plain_values),
        metrics=draw(st.dictionaries(texts, st.floats(), max_size=3)),
        teacher_log_probs=draw(arrays(np.float32, draw(st.sampled_from([0, sum(lengths)])))),
        greedy=draw(st.none() | st.builds(GreedyResponse, st.floats(allow_nan=False, allow_infinity=False), counts, counts)),
    )


messages = trajectories() | scored_groups()
