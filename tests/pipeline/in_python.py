"""A pipeline built in Python alone, as a script of its own: a function, rows and an agent that no other process can import.

    python -m tests.pipeline.in_python RUN_DIR

Its last line is the summary that `wait` returned.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import asyncrl

SUMS = [{"prompt": f"{a}+{b}+{c}=", "ground_truth": str(a + b + c)} for a in range(4) for b in range(4) for c in range(4)]


def main() -> None:
    longest = 2

    def first_digit(response: str, ground_truth: str) -> dict[str, float]:
        return {"score": float(response[:1] == ground_truth[:1]), "short": float(len(response) <= longest)}

    async def one_turn(prompt: Any, session: Any) -> None:
        await session.generate(prompt.prompt)

    pipeline = asyncrl.Pipeline(
        name="in-python",
        model={"path": "builtin/arithmetic"},
        prompts=SUMS,
        reward=first_digit,
        agent=one_turn,
        rollout={"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 8, "max_concurrent": 32},
        training={"steps": 3, "groups_per_step": 4, "filter": "keep"},
        tracking={"mlflow": None},
    )
    run = pipeline.launch(Path(sys.argv[1]), progress=False)
    assert not run.done
    summary = run.wait(200)
    assert run.done
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
