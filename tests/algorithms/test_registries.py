"""Every entry that a configuration may name has its function, and no function is out of reach."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.proximal import PROXIMALS
from asyncrl.config.built import NOT_BUILT
from asyncrl.config.schema import AlgorithmConfig


def names(annotation: Any) -> set[str]:
    """Names of the entry classes, or of the literals, in an annotation."""
    if isinstance(annotation, str):
        return {annotation}
    if hasattr(annotation, "model_fields"):
        return set(get_args(annotation.model_fields["name"].annotation))
    return {name for part in get_args(annotation) for name in names(part)}


@pytest.mark.parametrize(
    ("field", "registry"), [("advantage", ADVANTAGES), ("loss", LOSSES), ("correction", CORRECTIONS), ("proximal", PROXIMALS)]
)
def test_registry_and_configuration_name_the_same_entries(field, registry):
    configurable = names(AlgorithmConfig.model_fields[field].annotation)
    assert set(registry) == configurable - set(NOT_BUILT[f"algorithm.{field}"])
