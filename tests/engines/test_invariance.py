"""Batch-invariant decoding: a request's tokens and log-probs, bit for bit, are those of the same request served alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engines.embedded import EmbeddedServer, EngineOptions
from asyncrl.engines.embedded.invariant import BLOCK_ROWS, blocks_of, run_bounds
from asyncrl.engines.embedded.loop import EngineLoop
from asyncrl.engines.embedded.runner import ModelRunner
from asyncrl.engines.embedded.sequences import Sequence, Update
from asyncrl.errors import UserError
from tests.engines.harness import load, random_prompts, sequence
from tests.models import tiny_model

CONTEXT = 64
VARIANTS = [
    (architecture, tie, dtype)
    for architecture in ("qwen2", "qwen3", "llama")
    for tie in (True, False)
    for dtype in ("float32", "bfloat16")
]


class Served:
    """An engine driven step by step, without its thread."""

    def __init__(self, model: Any, *, max_slots: int, context: int = CONTEXT):
        self.runner = ModelRunner(model, max_slots=max_slots, context=context, batch_invariant=True)
        self.loop = EngineLoop(self.runner, self._listen)
        self.last: dict[str, Update] = {}

    def _listen(self, updates: Many[Update]) -> None:
        self.last.update((update.sequence.rid, update) for update in updates)

    def step(self, *arrivals: Sequence) -> None:
        self.loop.submit(arrivals)
        self.loop._take_inbox()
        self.loop._admit()
        if self.loop._scheduler.running:
            self.loop._step()

    def finish(self) -> dict[str, Update]:
        while self.loop._scheduler.busy:
            self.step()
        return self.last

    def swap(self, staged: dict[str, torch.Tensor], policy: Any) -> None:
        self.loop._commit(staged, "1.1", policy)


@dataclass(frozen=True)
class Group:
    """`size` requests for one prompt that arrive `wait` steps after the group before."""

    prompt: int
    size: int
    wait: int
    max_new: int
    settings: dict[str, Any]

    def sequences(self, number: int, prompts: Many[list[int]]) -> list[Sequence]:
        prompt = prompts[self.prompt]
        room = CONTEXT - len(prompt)
        return [
            sequence(
                prompt,
                rid=f"{number}/{member}",
                seed=1000 * number + member,
                max_new_tokens=min(self.max_new + member, room),
                **self.settings,
            )
            for member in range(self.size)
        ]


GROUPS = st.lists(
    st.builds(
        Group,
        prompt=st.integers(0, 5),
        size=st.integers(1, 9),
        wait=st.integers(0, 6),
        max_new=st.integers(1, 24),
        settings=st.sampled_from([{}, {"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.8}, {"top_k": 3}]),
    ),
    min_size=1,
    max_size=6,
)
PROMPTS = random_prompts(6, shortest=1, longest=40, seed=9)


def serve(served: Served, groups: Many[Group], prompts: Many[list[int]] = PROMPTS) -> dict[str, Update]:
    for number, group in enumerate(groups):
        for _ in range(group.wait):
            served.step()
        served.step(*group.sequences(number, prompts))
    return served.finish()


def alone(model: Any, one: Sequence, *, context: int = CONTEXT) -> Update:
    served = Served(model, max_slots=1, context=context)
    served.step(sequence(one.prompt.tolist(), rid="alone", **vars(one.sampling)))
    return served.finish()["alone"]


def assert_same(mine: Update, other: Update) -> None:
    assert mine.token_ids.tolist() == other.token_ids.tolist()
    assert mine.log_probs.tobytes() == other.log_probs.tobytes()


def check_mix(model: Any, groups: Many[Group], max_slots: int) -> None:
    updates = list(serve(Served(model, max_slots=max_slots), groups).values())
    for update in updates[:: len(updates) // 6 + 1]:
        assert_same(update, alone(model, update.sequence))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by (architecture, tied, dtype); made once."""
    made: dict[tuple[str, bool, str], Any] = {}

    def get(architecture: str = "qwen2", tie: bool = True, dtype: str = "float32") -> Any:
        key = architecture, tie, dtype
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            made[key] = load(tiny_model(folder, architecture=architecture, tie=tie, dtype=getattr(torch, dtype)), dtype=dtype)
        return made[key]

    return get


@pytest.mark.parametrize(("architecture", "tie", "dtype"), VARIANTS)
def test_every_architecture_and_dtype_in_a_crowd_is_as_alone(models, architecture, tie, dtype):
    groups = [
        Group(prompt=0, size=7, wait=0, max_new=9, settings={}),
        Group(prompt=3, size=3, wait=2, max_new=4, settings={"top_p": 0.8}),
        Group(prompt=0, size=12, wait=1, max_new=12, settings={"temperature": 0.7}),
        Group(prompt=5, size=1, wait=0, max_new=20, settings={}),
    ]
    check_mix(models(architecture, tie, dtype), groups, max_slots=19)


@settings(max_examples=12, deadline=None)
@given(groups=GROUPS, max_slots=st.sampled_from([2, 5, 17, 40]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_a_request_among_any_others_is_as_alone(models, groups, max_slots, dtype):
    check_mix(models(dtype=dtype), groups, max_slots)


def test_without_the_option_a_crowd_shows(models):
    """The property is one that can fail."""

    def log_probs(crowd: int) -> bytes:
        runner = ModelRunner(models(), max_slots=40, context=CONTEXT)
        tokens = np.arange(1, crowd + 1, dtype=np.int32)
        return runner.next_logits(tokens, np.zeros(crowd, np.int64))[0].numpy().tobytes()

    assert log_probs(1) != log_probs(40)


def test_a_full_batch_beyond_one_block_is_as_alone(models):
    groups = [Group(prompt=number % 6, size=50, wait=0, max_new=3, settings={}) for number in range(4)]
    updates = serve(Served(models(), max_slots=BLOCK_ROWS + 40), groups)
    for rid in ("0/0", "0/49", "2/27", "2/28", "3/17", "3/18", "3/49"):
        assert_same(updates[rid], alone(models(), updates[rid].sequence))


def test_prompts_and_responses_across_key_blocks_and_passes_are_as_alone(tmp_path):
    model = load(tiny_model(tmp_path, context=900))
    prompts = [*random_prompts(3, shortest=240, longest=256, seed=1), *random_prompts(2, shortest=505, longest=700, seed=2)]
    served = Served(model, max_slots=6, context=760)
    requests = [
        sequence(prompt, rid=str(seed), seed=seed, max_new_tokens=24) for seed, prompt in enumerate([*prompts, prompts[0]])
    ]
    served.step(*requests[:2])
    served.step(*requests[2:])
    for update in served.finish().values():
        assert_same(update, alone(model, update.sequence, context=760))


@settings(max_examples=6, deadline=None)
@given(
    groups=GROUPS,
    at=st.integers(0, 14),
    policy=st.sampled_from(["keep", "recompute"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_across_a_swap_a_request_is_as_alone_with_the_same_history(models, groups, at, policy, dtype):
    model = models("qwen3", False, dtype)
    staged = {
        name: (parameter * (1 + 0.25 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))).to(parameter.dtype)
        for name, parameter in model.named_parameters()
    }
    served = Served(model, max_slots=9)
    for number, group in enumerate(groups):
        served.step(*group.sequences(number, PROMPTS))
        if number == len(groups) // 2:
            for _ in range(at):
                served.step()
            served.swap(staged, policy)
    updates = served.finish()
    served.runner.exchange(staged)
    for update in list(updates.values())[:: len(updates) // 4 + 1]:
        single = Served(model, max_slots=1)
        swap_at = next((start for version, start in update.spans if version == "1.1"), None)
        if swap_at == 0:
            single.swap(staged, policy)
        single.step(sequence(update.sequence.prompt.tolist(), rid="alone", **vars(update.sequence.sampling)))
        if swap_at:
            for _ in range(swap_at - 1):
                single.step()
            single.swap(staged, policy)
        assert_same(update, single.finish()["alone"])
        if swap_at is not None:
            single.runner.exchange(staged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_response_cut_anywhere_goes_on_as_if_it_had_not_been(models, dtype):
    model = models("llama", True, dtype)
    for options in ({}, {"top_p": 0.9}, {"temperature": 0}):
        whole = alone(model, sequence(PROMPTS[1], seed=7, max_new_tokens=20, **options))
        served = Served(model, max_slots=7)
        cuts = {}
        for made in range(1, 20):
            rest = replace(whole.sequence.sampling, max_new_tokens=20 - made, seed_offset=made)
            cuts[made] = sequence([*PROMPTS[1], *whole.token_ids[:made].tolist()], rid=str(made), **vars(rest))
            served.step(cuts[made])
        for made, update in ((int(rid), update) for rid, update in served.finish().items()):
            assert update.token_ids.tolist() == whole.token_ids[made:].tolist()
            assert update.log_probs.tobytes() == whole.log_probs[made:].tobytes()


def test_a_fresh_process_gives_the_same_bits(tmp_path):
    folder = tiny_model(tmp_path / "model")
    groups = [Group(prompt=number, size=4, wait=1, max_new=10, settings={}) for number in range(4)]
    mine = serve(Served(load(folder), max_slots=11), groups)
    command = [sys.executable, "-m", "tests.engines.test_invariance", str(folder), json.dumps([PROMPTS[2], 10 + 3, 2003])]
    answer = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=None, capture_output=True, text=True, timeout=120, check=True
    )
    tokens, log_probs = json.loads(answer.stdout.splitlines()[-1])
    assert tokens == mine["2/3"].token_ids.tolist()
    assert log_probs == mine["2/3"].log_probs.tobytes().hex()


def test_a_model_that_cannot_be_served_so_is_refused_by_name(tmp_path):
    model = load(tiny_model(tmp_path, architecture="gpt_neox"))
    with pytest.raises(UserError, match=r"GPTNeoXForCausalLM cannot be .*inference\.batch_invariant"):
        ModelRunner(model, max_slots=2, context=32, batch_invariant=True)


@pytest.mark.parametrize(("architecture", "expected"), [("gpt_neox", False), ("qwen2", True)])
async def test_auto_serves_a_model_as_it_can_be_served(tmp_path, architecture, expected):
    folder = tiny_model(tmp_path, architecture=architecture)
    server = EmbeddedServer(folder, EngineOptions(context_tokens=32, max_batch=2, batch_invariant="auto"))
    await server.start()
    assert server.engine.batch_invariant is expected
    await server.close()


@given(rows=st.integers(1, 1000))
def test_blocks_cover_the_rows_and_waste_less_than_one_block(rows):
    blocks = blocks_of(rows, (16, 64, 128))
    assert rows <= sum(blocks) < rows + 64 + 1
    assert blocks_of(rows, (128,)) == (128,) * -(-rows // 128)


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=8))
def test_rows_that_read_together_read_as_many_keys_and_belong_together(lengths):
    slots = np.repeat(np.arange(3, 3 + len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    bounds = run_bounds(slots, positions, False)
    assert [begin for begin, _, _ in bounds] == [0, *(end for _, end, _ in bounds[:-1])]
    assert bounds[-1][1] == len(slots)
    for begin, end, slot in bounds:
        assert set(slots[begin:end]) == {slot}
        assert len(set(positions[begin:end] // 256)) == 1


def _answer_alone(folder: str, prompt: list[int], max_new_tokens: int, seed: int) -> None:
    update = alone(load(folder), sequence(prompt, max_new_tokens=max_new_tokens, seed=seed))
    print(json.dumps([update.token_ids.tolist(), update.log_probs.tobytes().hex()]))


if __name__ == "__main__":
    _answer_alone(sys.argv[1], *json.loads(sys.argv[2]))
