"""Every entry that a configuration may name has its function with formula and source, and no function is out of reach."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.divergence import ESTIMATORS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.proximal import PROXIMALS
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.built import NOT_BUILT
from asyncrl.config.entries import Advantage, Correction, KlEstimator, Loss, entries_of

KINDS = [("advantage", Advantage, ADVANTAGES), ("loss", Loss, LOSSES), ("correction", Correction, CORRECTIONS)]


@pytest.mark.parametrize(("field", "union", "registry"), KINDS)
def test_registry_and_configuration_name_the_same_entries(field, union, registry):
    assert set(registry) == set(entries_of(union))
    assert set(NOT_BUILT[f"algorithm.{field}"]) < set(registry)


def test_proximals_and_estimators_are_those_of_the_configuration():
    assert set(PROXIMALS) == set(get_args(AlgorithmConfig.model_fields["proximal"].annotation))
    assert {name + plus for name in ESTIMATORS for plus in ("", "+")} == set(get_args(KlEstimator))


def test_what_a_loss_s_definition_has_is_what_its_entry_says_it_needs():
    for name, definition in LOSSES.items():
        needs = entries_of(Loss)[name].requires
        assert (definition.weight is not None) == needs.weight, name
        assert (definition.select is not None) == needs.mini_batch, name


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *((name, function) for _, _, registry in KINDS[::2] for name, function in registry.items()),
        *((name, definition.values) for name, definition in LOSSES.items()),
        *ESTIMATORS.items(),
        *((name, definition.log_probs) for name, definition in PROXIMALS.items()),
    ],
)
def test_every_function_says_its_formula_and_its_source(name, function):
    formula, _, rest = (function.__doc__ or "").strip().partition("\n")
    assert formula, name
    if name not in ("none", "general", "staleness_tis", "segment_tis", "abs"):  # asyncrl's own, or nobody's
        assert re.search(r"arXiv \d{4}\.\d{4,5}|Ionides|Precup|richardli|joschu|Williams", rest), name
