"""Making a built-in model beside Ray's start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.cluster.builtin_model import ModelMaker
from asyncrl.errors import RunError


def test_what_was_made_is_there_when_it_is_done(tmp_path: Path) -> None:
    maker = ModelMaker("builtin/arithmetic", {"ASYNCRL_CACHE": str(tmp_path)})
    maker.wait()
    maker.close()
    assert [folder.name.startswith("builtin-arithmetic") for folder in (tmp_path / "models").iterdir()] == [True]


def test_a_model_that_cannot_be_made_is_named_with_the_reason() -> None:
    maker = ModelMaker("builtin/arithmetic", {"ASYNCRL_CACHE": os.devnull})
    with pytest.raises(RunError, match=r"builtin/arithmetic could not be made: NotADirectoryError: .*/dev/null"):
        maker.wait()
    maker.close()


def test_a_maker_that_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    maker = ModelMaker("builtin/arithmetic", {"ASYNCRL_CACHE": str(tmp_path)})
    maker.close()
    assert not list(tmp_path.glob("models/builtin-*"))
