"""From what a pipeline file says to prompts: files, functions, built-ins, Python objects."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.data import StreamSource, TableSource, open_eval_prompts, open_prompts
from asyncrl.data.builtin import arithmetic
from asyncrl.errors import UserError

ROWS = [{"prompt": f"{n}+1=", "ground_truth": str(n + 1), "level": n} for n in range(5)]


def jsonl(folder, *lines):
    path = folder / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def all_rows(source):
    return sorted((source.next()[1] for _ in range(source.num_rows)), key=lambda prompt: prompt.row)


def test_a_jsonl_file_gives_its_rows(tmp_path):
    path = jsonl(tmp_path, *(json.dumps(row) for row in ROWS), "")
    prompts = all_rows(open_prompts(str(path), seed=0))
    assert [prompt.prompt for prompt in prompts] == [row["prompt"] for row in ROWS]
    assert [prompt.extra_info for prompt in prompts] == [{"level": n} for n in range(5)]


def test_a_parquet_file_gives_the_same_rows_as_jsonl(tmp_path):
    rows = [{**row, "sampling": {"max_new_tokens": 3}, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_parquet = open_prompts(str(tmp_path / "rows.parquet"), seed=3)
    from_jsonl = open_prompts(str(jsonl(tmp_path, *map(json.dumps, rows))), seed=3)
    assert [from_parquet.next() for _ in range(8)] == [from_jsonl.next() for _ in range(8)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "a"}', "{oops"], "rows.jsonl:2: not a JSON object"),
        (['{"prompt": "a"}', "", '{"text": "b"}'], "rows.jsonl:3: the row has no 'prompt'"),
        ([], "has no row"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_line(tmp_path, lines, words):
    with pytest.raises(UserError) as refused:
        open_prompts(str(jsonl(tmp_path, *lines)), seed=0)
    assert words in str(refused.value)
    assert str(refused.value).startswith("data.train")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("nowhere.jsonl", "there is no such file"),
        ("builtin/chess", "no built-in task: there is builtin/arithmetic"),
        ("rows.csv", "give a .jsonl or .parquet file"),
        ("nowhere.py:rows", "there is no such file"),
        ("no_such_module:rows", "ModuleNotFoundError"),
    ],
)
def test_data_that_is_not_there_is_refused(data, words):
    with pytest.raises(UserError) as refused:
        open_prompts(data, seed=0)
    assert words in str(refused.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        open_prompts(str(tmp_path / "rows.parquet"), seed=0)


def test_a_function_in_a_file_gives_a_table_or_a_stream(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import itertools\n"
        "def listed():\n    return ['a', 'b']\n"
        "def endless():\n    for n in itertools.count():\n        yield {'prompt': f'{n}+1='}\n"
        "def broken():\n    raise OSError('no disk')\n"
    )
    assert isinstance(open_prompts(f"{path}:listed", seed=0), TableSource)
    endless = open_prompts(f"{path}:endless", seed=0)
    assert isinstance(endless, StreamSource)
    assert endless.next()[1].prompt == "0+1="
    assert [prompt.prompt for prompt in open_eval_prompts(f"{path}:endless", samples=2)] == ["0+1=", "1+1="]
    with pytest.raises(UserError, match="raised OSError: no disk"):
        open_prompts(f"{path}:broken", seed=0)
    with pytest.raises(UserError, match=r"'missing', which .*mine.py does not define: it has broken, endless, listed"):
        open_prompts(f"{path}:missing", seed=0)


def test_python_objects_are_data_too():
    assert open_prompts(ROWS, seed=0).num_rows == 5
    assert open_prompts(lambda: ROWS, seed=0).num_rows == 5
    assert open_prompts(lambda: iter(ROWS), seed=0).num_rows is None
    with pytest.raises(UserError, match=r"data.train: row 1: the row has no 'prompt'"):
        open_prompts([{"prompt": "a"}, {"text": "b"}], seed=0)


def test_evaluation_takes_no_more_prompts_than_samples():
    assert len(open_eval_prompts(ROWS, samples=3)) == 3
    with pytest.raises(UserError, match=r"data.eval has no row"):
        open_eval_prompts([], samples=3)


def test_arithmetic_holds_out_prompts_that_never_train():
    train = {row["prompt"] for row in arithmetic.rows("train")}
    held_out = {row["prompt"] for row in arithmetic.rows("eval")}
    assert len(held_out) >= 100
    assert not train & held_out
    assert len(train | held_out) == 1000
    assert {prompt for prompt, _ in arithmetic.examples()} == train


def test_arithmetic_answers_are_the_sums():
    for row in (*arithmetic.rows("train"), *arithmetic.rows("eval")):
        assert row["ground_truth"] == str(sum(map(int, row["prompt"].rstrip("=").split("+"))))


def test_reading_data_loads_neither_torch_nor_transformers():
    program = (
        "import sys; from asyncrl.data import open_prompts; open_prompts('builtin/arithmetic', seed=0).next();"
        "sys.exit(' '.join(name for name in ('torch', 'transformers', 'ray', 'pyarrow') if name in sys.modules) or None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
