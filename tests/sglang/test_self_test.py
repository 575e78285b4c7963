"""The self-test against a real server: what agrees passes, and each thing that goes wrong is caught by its name."""

from __future__ import annotations

import pytest
import torch

from asyncrl.engines.probes import check_tokenizer, probe, vocabulary_of
from asyncrl.engines.tokenizer import HfTokenizer
from asyncrl.errors import RunError
from asyncrl.protocols.weights import PolicyVersion
from asyncrl.services.trainer.self_test import self_test
from asyncrl.weight_sync.channel import ReceiverChannel
from tests.engines.training import config, engine_of_one_rank
from tests.sglang.servers import RunningServer
from tests.weight_sync.stand_in import StagedModel


class OneRank:
    """The trainer's side."""

    def __init__(self, engine):
        self._engine = engine

    async def judge(self, batch, temperature, *, rounded=False):
        return self._engine.judge(batch, temperature, rounded)


def parameters(server: RunningServer) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


async def compare(server: RunningServer, incarnation: int, weights: dict[str, torch.Tensor], *, served_at: float, run: float):
    """The server holds these weights and samples at one temperature; the trainer holds the folder's, and the run's temperature
    is another."""
    channel, staged = ReceiverChannel(server.receiver), StagedModel(weights)
    try:
        await channel.update(staged.order(PolicyVersion(incarnation, 0)))
    finally:
        staged.remove()
        await channel.close()
    groups = await probe(
        server.name,
        server.url,
        token=None,
        is_embedded=False,
        temperature=served_at,
        vocabulary=vocabulary_of(server.model_folder),
        context_tokens=64,
    )
    with engine_of_one_rank(server.model_folder, config(rollout={"temperature": run, "max_response_tokens": 64})) as engine:
        return await self_test(OneRank(engine), {server.name: groups}, when="as loaded", dtype="float32", temperature=run)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_a_server_of_the_same_weights_agrees(shared, incarnation, temperature):
    figures = await compare(shared, incarnation, parameters(shared), served_at=temperature, run=temperature)
    assert figures == {f"self_test/{shared.name}/log_prob_gap": pytest.approx(0, abs=1e-5)}


@pytest.mark.parametrize(("served_at", "run", "words"), [(1.0, 0.7, "not applied by the server"), (0.7, 1.0, "samples at 0.7")])
async def test_a_temperature_on_one_side_alone_is_named(shared, incarnation, served_at, run, words):
    with pytest.raises(RunError, match=f"inference/0 .*Likely cause: temperature: .*{words}"):
        await compare(shared, incarnation, parameters(shared), served_at=served_at, run=run)


async def test_weights_moved_by_a_hundredth_are_named(shared, incarnation):
    generator = torch.Generator().manual_seed(3)
    moved = {name: w * (1 + 0.01 * torch.randn(w.shape, generator=generator)) for name, w in parameters(shared).items()}
    with pytest.raises(RunError, match=r"inference/0 .*Likely cause: weights: "):
        await compare(shared, incarnation, moved, served_at=1.0, run=1.0)


async def test_weights_of_a_lower_precision_are_named(shared, incarnation):
    rounded = {name: weights.bfloat16().float() for name, weights in parameters(shared).items()}
    with pytest.raises(RunError, match=r"inference/0 .*Likely cause: dtype: "):
        await compare(shared, incarnation, rounded, served_at=1.0, run=1.0)


async def test_another_tokenizer_is_named_with_the_text_that_tells(shared, tmp_path):
    own = HfTokenizer(shared.model_folder)
    await check_tokenizer(shared.name, shared.url, token=None, tokenizer=own)

    class Shifted:
        eos_token_ids = own.eos_token_ids

        def encode_prompt(self, prompt):
            return [token + 1 for token in own.encode_prompt(prompt)]

        def decode(self, tokens):
            return own.decode([token - 1 for token in tokens])

    with pytest.raises(RunError, match=r"self-test: the tokenizer of inference/0 is not the run's: '3\+4\+5=' is"):
        await check_tokenizer(shared.name, shared.url, token=None, tokenizer=Shifted())
