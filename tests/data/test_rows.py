"""What a row may be, and what is refused by name."""

import datetime

import numpy as np
import pytest

from asyncrl.data import check_longest_prompts, check_prompt, prompt_from_row
from asyncrl.errors import UserError

LIMITS = {"max_prompt_tokens": 8, "max_response_tokens": 16, "key": "data.train"}


def test_what_a_row_carries_besides_is_extra_info():
    prompt = prompt_from_row({"prompt": "1+1=", "ground_truth": "2", "level": 3, "tags": ["a"]}, 5, "data.train: row 5")
    assert (prompt.row, prompt.prompt, prompt.ground_truth) == (5, "1+1=", "2")
    assert prompt.extra_info == {"level": 3, "tags": ["a"]}


def test_text_alone_is_a_prompt():
    assert prompt_from_row("hello", 0, "here").prompt == "hello"


def test_chat_messages_are_kept_as_they_are():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": None}]
    assert prompt_from_row({"prompt": messages}, 0, "here").prompt == [messages[0], {"role": "user", "content": "hi"}]


def test_values_of_other_libraries_become_plain():
    row = {"prompt": "p", "ground_truth": np.float32(0.5), "when": datetime.date(2024, 1, 2), "scores": np.arange(2)}
    prompt = prompt_from_row(row, 0, "here")
    assert prompt.ground_truth == 0.5
    assert prompt.extra_info == {"when": "2024-01-02", "scores": [0, 1]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (7, "a row is an object"),
        ({"question": "1+1="}, "no 'prompt', only 'question'"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": 3}, "text or a list of chat messages"),
        ({"prompt": [{"content": "hi"}]}, "message 0"),
        ({"prompt": "p", "sampling": {"temperature": 0.5}}, "unknown key 'temperature'"),
        ({"prompt": "p", "sampling": {"max_new_tokens": 0}}, "at least 1"),
        ({"prompt": "p", "sampling": {"max_new_tokens": True}}, "whole number"),
        ({"prompt": "p", "sampling": {"ignore_eos": 1}}, "true or false"),
        ({"prompt": "p", "sampling": [1]}, "must be an object"),
        ({"prompt": "p", "thing": object()}, "'thing' holds a object"),
        ({"prompt": "p\ud83d"}, "prompt holds half of a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "\udc00"}]}, "prompt[0].content holds half"),
        ({"prompt": "p", "ground_truth": "\ud800"}, "ground_truth holds half"),
        ({"prompt": "p", "notes": [{"deep\udfff": 1}]}, "notes holds half"),
    ],
)
def test_a_bad_row_is_refused_by_its_name(row, words):
    with pytest.raises(UserError, match=r"train.jsonl:17") as refused:
        prompt_from_row(row, 16, "data.train: train.jsonl:17")
    assert words in str(refused.value)


def test_a_prompt_longer_than_the_run_has_room_for_is_refused():
    with pytest.raises(UserError, match=r"row 3 has 9 tokens, and rollout.max_prompt_tokens is 8"):
        check_prompt(prompt_from_row("123456789", 3, "here"), 9, **LIMITS)


def test_a_row_that_asks_for_more_than_the_run_allows_is_refused():
    prompt = prompt_from_row({"prompt": "p", "sampling": {"max_new_tokens": 17}}, 3, "here")
    with pytest.raises(UserError, match=r"row 3 asks for sampling.max_new_tokens 17"):
        check_prompt(prompt, 1, **LIMITS)


def test_the_longest_of_many_rows_is_found_before_anything_starts():
    prompts = [prompt_from_row("x" * (9 if row == 777 else 3), row, "here") for row in range(1000)]
    encoded = []

    def encode(text):
        encoded.append(text)
        return list(range(len(text)))

    with pytest.raises(UserError, match="row 777"):
        check_longest_prompts(prompts, encode, **LIMITS)
    assert len(encoded) <= 64
