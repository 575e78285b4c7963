"""Rows and reward of the mathematics pipelines: GSM8K's jsonl, parquet files of problems, and answers that stand in a box.

Files lie in `data/`, or in the folder that the environment variable ASYNCRL_DATA names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


def gsm8k_train() -> Iterator[dict[str, Any]]:
    return _gsm8k("train")


def gsm8k_test() -> Iterator[dict[str, Any]]:
    return _gsm8k("test")


def dapo_train() -> Iterator[dict[str, Any]]:
    return _problems("dapo_math.parquet")


def aime() -> Iterator[dict[str, Any]]:
    return _problems("aime.parquet")


def score(response: str, ground_truth: str) -> dict[str, float]:
    """1 for the right answer in the last box of the response, else 0; `boxed` says whether there was one."""
    answer = boxed(response)
    return {"score": float(answer is not None and same(answer, str(ground_truth))), "boxed": float(answer is not None)}


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…}, braces within it matched; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place].strip()
    return None


def same(one: str, other: str) -> bool:
    """Equal as numbers where both are numbers, else as texts without decoration."""
    numbers = _number(one), _number(other)
    return numbers[0] == numbers[1] if None not in numbers else _plain(one) == _plain(other)


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:left|right|,|!|;|text|mathrm|displaystyle)", "", text)
    return re.sub(r"[\s$,{}]|\\%|%|\.$", "", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))


def _number(text: str) -> Fraction | None:
    whole = _plain(re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text))
    try:
        return Fraction(whole)
    except (ValueError, ZeroDivisionError):
        return None


def _gsm8k(split: str) -> Iterator[dict[str, Any]]:
    """Lines {"question", "answer"}, whose answers end in `#### 42`."""
    with _file(f"gsm8k/{split}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield _row(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", ""))


def _problems(name: str) -> Iterator[dict[str, Any]]:
    """Columns `prompt` (text) and `answer`."""
    import pyarrow.parquet as parquet

    for batch in parquet.ParquetFile(_file(name)).iter_batches(columns=["prompt", "answer"]):
        for row in batch.to_pylist():
            yield _row(row["prompt"], str(row["answer"]))


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}], "ground_truth": answer}


def _file(name: str) -> Path:
    path = Path(os.environ.get("ASYNCRL_DATA", "data")) / name
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: put it there, or name its folder in ASYNCRL_DATA")
    return path
