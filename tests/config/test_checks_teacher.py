"""A teacher that lacks what the run needs of it."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.checks import check_config
from asyncrl.config.facts import Facts, ModelFacts
from asyncrl.config.schema import Config
from tests.config.samples import MINIMAL

STUDENT = ModelFacts(context_tokens=64, vocabulary=40)


def problems(teacher: ModelFacts | None = None, *, temperature: float = 1.0, **where: Any) -> list[str]:
    values = {
        **MINIMAL,
        "algorithm": {"advantage": "distillation", "teacher": where or {"path": "teacher"}},
        "rollout": {**MINIMAL["rollout"], "temperature": temperature},
    }
    return [problem.message for problem in check_config(Config.model_validate(values), Facts(model=STUDENT, teacher=teacher))]


def test_a_teacher_of_the_same_vocabulary_with_room_passes() -> None:
    assert problems(ModelFacts(context_tokens=64, vocabulary=40)) == []


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        (ModelFacts(context_tokens=64, vocabulary=41), "with 41 tokens"),
        (ModelFacts(context_tokens=4, vocabulary=40), "with a context of 4 tokens"),
    ],
)
def test_one_without_the_student_s_tokens_or_without_room_is_refused(teacher: ModelFacts, words: str) -> None:
    (message,) = problems(teacher)
    assert words in message


def test_a_running_server_judges_at_temperature_1_alone() -> None:
    assert problems(url="http://127.0.0.1:1") == []
    (message,) = problems(url="http://127.0.0.1:1", temperature=0.7)
    assert "set it to 1" in message
    assert problems(ModelFacts(context_tokens=64, vocabulary=40), temperature=0.7) == []
