"""A version as whole tensors, by the names that servers load."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.weight_sync.slots import SlotMaps
from asyncrl.weight_sync.whole import checkpoint_names, groups, whole_tensors
from tests.weight_sync.stand_in import StagedModel, TwoRankModel, a_model


@pytest.mark.parametrize("make", [StagedModel, TwoRankModel])
def test_slots_of_one_rank_or_two_become_whole_tensors(make):
    tensors, into = a_model(), {}
    staged, maps = make(tensors), SlotMaps()
    try:
        assert whole_tensors(staged.order(), maps, into) == []
        assert into.keys() == tensors.keys()
        assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    finally:
        staged.remove()


def test_a_byte_that_lies_wrong_is_told_by_its_slice():
    staged, maps = StagedModel(a_model()), SlotMaps()
    try:
        staged.flip()
        assert whole_tensors(staged.order(), maps, {}) == [0]
    finally:
        staged.remove()


def test_the_model_may_be_another_one_next_time():
    into, maps = {}, SlotMaps()
    for model in (a_model(), a_model(rows=20), {"other": torch.ones(3, dtype=torch.bfloat16)}):
        staged = StagedModel(model)
        whole_tensors(staged.order(), maps, into)
        staged.remove()
        assert {name: tensor.shape for name, tensor in into.items()} == {name: tensor.shape for name, tensor in model.items()}


def test_groups_hold_each_tensor_once_in_order_and_one_dtype_each():
    tensors = {f"t{n}": torch.zeros(n, dtype=torch.float32 if n % 5 else torch.bfloat16) for n in range(1, 40)}
    found = groups(tensors, 256)
    assert [name for group in found for name in group] == list(tensors)
    for group in found:
        assert len({tensors[name].dtype for name in group}) == 1
        assert len(group) == 1 or sum(tensors[name].nbytes for name in group) <= 256


def test_experts_have_the_names_and_values_of_a_saved_checkpoint(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    named = checkpoint_names({name: parameter.detach() for name, parameter in model.named_parameters()})
    assert named.keys() == saved.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in saved.items())
