"""What a teacher needs of the rest of the file. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.facts import Facts
from asyncrl.config.schema import Config
from asyncrl.errors import Problem


def check_teacher(config: Config, facts: Facts) -> Iterator[Problem]:
    """Exactly one place where the teacher is, which gives log-probs of this run's tokens at this run's temperature."""
    advantage, teacher = config.algorithm.advantage, config.algorithm.teacher
    if not advantage.needs.teacher:
        return
    if (teacher.path is None) == (teacher.url is None):
        found = "both algorithm.teacher.path and url are set" if teacher.path else "algorithm.teacher names none"
        yield Problem(
            "algorithm.teacher",
            f"algorithm.advantage is {advantage.name}, which needs one teacher, and {found}: set algorithm.teacher.path to a "
            "model that the run is to serve, or algorithm.teacher.url to a running server",
        )
    temperature = config.rollout.temperature
    if teacher.url is not None and temperature != 1:
        yield Problem(
            "algorithm.teacher.url",
            f"algorithm.teacher.url is {teacher.url}, and SGLang gives log-probs of a prompt at temperature 1 alone, but "
            f"rollout.temperature is {temperature:g}: set it to 1, or give the teacher as algorithm.teacher.path",
        )
    yield from _check_sizes(config, facts)


def _check_sizes(config: Config, facts: Facts) -> Iterator[Problem]:
    """A teacher of the run's own that is known to lack tokens, or room for them."""
    path, model, teacher = config.algorithm.teacher.path, facts.model, facts.teacher
    if path is None or teacher is None:
        return
    if model is not None and None not in (model.vocabulary, teacher.vocabulary) and model.vocabulary != teacher.vocabulary:
        yield Problem(
            "algorithm.teacher.path",
            f"algorithm.teacher.path is {path}, with {teacher.vocabulary} tokens, but {config.model.path} has "
            f"{model.vocabulary}: a teacher judges the student's own tokens, so give one of the same vocabulary",
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if teacher.context_tokens is not None and longest > teacher.context_tokens:
        yield Problem(
            "algorithm.teacher.path",
            f"algorithm.teacher.path is {path}, with a context of {teacher.context_tokens} tokens, but "
            f"rollout.max_prompt_tokens + max_response_tokens is {longest}: lower those, or give another teacher",
        )


CHECKS = (check_teacher,)
