"""`algorithms`: every name with what it needs, and one in full."""

from __future__ import annotations

import pytest

from asyncrl.cli.algorithms import every_name
from tests.cli.harness import asyncrl


def test_the_table_says_of_every_name_what_it_needs() -> None:
    out = asyncrl("algorithms").out
    lines = {tuple(line.split()[:2]): line for line in out.splitlines()}
    assert "critic" in lines["advantage", "gae"]
    assert "greedy sample" in lines["advantage", "remax"]
    assert "group size > 1" in lines["advantage", "grpo"]
    assert "proximal recompute" in lines["correction", "seq_mis"]
    assert lines["loss", "ppo_clip"].endswith("yes")
    assert lines["advantage", "remax"].endswith("yes")
    assert {(known.kind, known.name) for known in every_name()} <= set(lines)


@pytest.mark.parametrize("name", sorted({known.name for known in every_name()}))
def test_every_name_is_explained_with_its_formula(name: str) -> None:
    outcome = asyncrl("algorithms", name)
    assert outcome.code == 0
    assert "formula:" in outcome.out
    assert "code:    asyncrl.algorithms." in outcome.out


def test_a_name_has_its_parameters_with_defaults_and_its_paper() -> None:
    (found,) = asyncrl("algorithms", "ppo_clip", "--json").json["algorithms"]
    assert "max(−A r, −A clip(r" in found["formula"]
    assert "arXiv 1707.06347" in found["source"]
    (high,) = [item for item in found["parameters"] if item["name"] == "clip_high"]
    assert (high["default"], high["takes"]) == ("0.28", "a number, above 0")
    (dro,) = asyncrl("algorithms", "dro", "--json").json["algorithms"]
    assert {item["name"]: item["default"] for item in dro["parameters"]}["beta"] == "required"


def test_a_name_of_two_kinds_is_explained_twice() -> None:
    assert [found["kind"] for found in asyncrl("algorithms", "gpg", "--json").json["algorithms"]] == ["advantage", "loss"]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    outcome = asyncrl("algorithms", "gspoo")
    assert outcome.code == 2
    assert "the nearest known one is gspo" in outcome.err
