"""How reward functions are found, and which fields they are given."""

import functools

import pytest

from asyncrl.errors import UserError
from asyncrl.rewards import FunctionSpec, resolve
from asyncrl.rewards.function import FIELDS

ITEM = {"prompt": "p", "response": "r", "ground_truth": "g", "extra_info": {"k": 1}, "finish_reason": "stop"}


def test_a_function_is_given_only_the_fields_that_it_takes():
    assert resolve(lambda response, extra_info: (response, extra_info))(ITEM) == ("r", {"k": 1})


def test_a_function_with_keywords_is_given_every_field():
    function = resolve(lambda **fields: set(fields))
    assert function.accepts == FIELDS
    assert function(ITEM) == set(FIELDS)


def test_parameters_with_defaults_keep_them():
    assert resolve(lambda response, scale=3: response * scale)(ITEM) == "rrr"


def test_async_functions_partials_and_callable_objects_are_known_as_such():
    async def judge(response):
        return 1.0

    class Judge:
        async def __call__(self, response):
            return 1.0

    assert resolve(judge).is_async
    assert resolve(functools.partial(judge)).is_async
    assert resolve(Judge()).is_async
    assert not resolve(lambda response: 1.0).is_async


def test_a_ready_made_name_is_found():
    assert resolve("exact_match")({"response": "a", "ground_truth": "a"}) == 1.0


def test_a_file_is_found_below_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def judge(response):\n    return len(response)\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("mine.py:judge")(ITEM) == 1


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "reward_module_of_a_test.py").write_text("def judge(response):\n    return len(response)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert resolve("reward_module_of_a_test:judge")(ITEM) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact_mach", ["exact_mach", "did you mean exact_match", "numeric", "file.py:fn"]),
        ("nowhere/mine.py:judge", ["nowhere/mine.py", "no such file"]),
        ("no_such_module:judge", ["no_such_module"]),
        ("asyncrl.rewards.ready:exact_mach", ["exact_mach", "asyncrl.rewards.ready"]),
        ("asyncrl.rewards.ready:READY_MADE", ["dict", "function"]),
    ],
)
def test_what_cannot_be_found_is_named(name, words):
    with pytest.raises(UserError) as error:
        resolve(name)
    for word in words:
        assert word in str(error.value)


def test_a_file_that_raises_is_named_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"broken.py raised ZeroDivisionError"):
        resolve(f"{tmp_path}/broken.py:judge")


def test_a_parameter_that_nobody_fills_is_refused():
    with pytest.raises(UserError, match=r"needs the parameter 'answer'.*ground_truth"):
        resolve(lambda response, answer: 1.0)
    with pytest.raises(UserError, match="did you mean response"):
        resolve(lambda respones: 1.0)
    with pytest.raises(UserError, match="positional-only"):
        resolve(lambda response, /: 1.0)


def test_a_spec_carries_a_name_or_the_function_itself():
    factor = 2.0
    assert FunctionSpec.of("a", "numeric").is_ready_made
    assert FunctionSpec.of("a", lambda response: factor).load()(ITEM) == factor
    assert FunctionSpec.of("a", "mine.py:judge").source.startswith("/")
    assert FunctionSpec.of("<not importable>", test_a_spec_carries_a_name_or_the_function_itself).name.startswith("test_a_spec")
