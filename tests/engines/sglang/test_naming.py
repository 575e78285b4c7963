"""Where a loader puts Hugging Face tensors, found without moving anything."""

from __future__ import annotations

import pytest
import torch

from asyncrl.engines.sglang.naming import places
from asyncrl.engines.sglang.shadow import Shadow
from asyncrl.errors import PlanMismatch
from tests.engines.sglang.fused import FusedModel, FusedParameter, hugging_face_weights, shapes_of


def test_what_is_written_to_the_places_is_what_the_loader_would_have_loaded():
    weights = hugging_face_weights()
    loaded, written = FusedModel(), FusedModel()
    loaded.load_weights(weights.items())
    parameters = [parameter.data for parameter in written.parameters()]
    found = places(written.load_weights, parameters, shapes_of(weights), torch.float32)
    for name, tensor in weights.items():
        found[name].view(parameters[found[name].parameter]).copy_(tensor)
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), written.parameters(), strict=True))


def test_looking_for_places_changes_no_parameter():
    model, weights = FusedModel(), hugging_face_weights()
    model.load_weights(hugging_face_weights(seed=1).items())
    before = [parameter.clone() for parameter in model.parameters()]
    places(model.load_weights, [parameter.data for parameter in model.parameters()], shapes_of(weights), torch.float32)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_name_that_the_loader_passes_over_is_refused():
    model = FusedModel()
    with pytest.raises(PlanMismatch, match=r"layers\.0\.rotary: the server's model has no such parameter"):
        places(model.load_weights, [p.data for p in model.parameters()], {"layers.0.rotary": (4,)}, torch.float32)


def test_a_tensor_that_is_loaded_in_slices_is_refused():
    target = torch.zeros(4, 8)

    def load(weights):
        for _, loaded in weights:
            target.copy_(loaded.narrow(0, 4, 4))

    with pytest.raises(PlanMismatch, match="in parts"):
        places(load, [target], {"w": (8, 8)}, torch.float32)


def test_a_tensor_that_changes_its_form_is_refused():
    target = torch.zeros(8, 4)

    def load(weights):
        for _, loaded in weights:
            target.copy_(loaded.t())

    with pytest.raises(PlanMismatch, match="w: the server keeps it in"):
        places(load, [target], {"w": (4, 8)}, torch.float32)


def test_a_loader_that_raises_is_refused_with_its_words():
    def load(weights):
        raise KeyError("no scale")

    with pytest.raises(PlanMismatch, match="KeyError: 'no scale'"):
        places(load, [torch.zeros(2)], {"w": (2,)}, torch.float32)


def test_one_of_many_experts_has_a_place():
    experts = torch.zeros(3, 4, 5)

    def load(weights):
        for name, loaded in weights:
            experts[int(name)].copy_(loaded)

    place = places(load, [experts], {"1": (4, 5)}, torch.float32)["1"]
    place.view(experts).fill_(7)
    assert experts.sum(dim=(1, 2)).tolist() == [0, 140, 0]


def test_a_shadow_loads_into_memory_of_its_own_with_the_originals_loaders():
    model, weights = FusedModel(), hugging_face_weights()
    model.load_weights(hugging_face_weights(seed=1).items())
    before = [parameter.clone() for parameter in model.parameters()]
    shadow = Shadow(model)
    shadow.model.load_weights(weights.items())
    expected = FusedModel()
    expected.load_weights(weights.items())
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(expected.parameters(), shadow.model.parameters(), strict=True))
    assert len(shadow.pairs) == len(list(model.parameters()))
    assert type(shadow.model.embed) is FusedParameter
    assert shadow.model.head is shadow.model.embed, "tied stays tied"
