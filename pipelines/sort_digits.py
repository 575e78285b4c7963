"""A pipeline built in Python alone: a tiny model learns to sort digits ("5294>" -> "2459").

    python pipelines/sort_digits.py

What a user brings is here in full: a model folder, prompts, and a reward function. No YAML. The model is made on first use by a
short supervised warm-up on the task, stopped early, so that there is something left for reinforcement learning to do.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import asyncrl
from asyncrl.engines.builtin import Recipe, prepare

NUM_PROMPTS, NUM_HELD_OUT = 2000, 200


def sorted_share(response: str, ground_truth: str) -> dict[str, float]:
    """1 for the digits in order. `right_places` is logged beside the score, and does not train."""
    right = sum(given == wanted for given, wanted in zip(response, ground_truth, strict=False))
    return {"score": float(response == ground_truth), "right_places": right / len(ground_truth)}


def make_rows() -> list[dict[str, Any]]:
    """Distinct rows of 3 to 5 digits, always the same."""
    generator = random.Random(0)
    prompts: dict[str, str] = {}
    while len(prompts) < NUM_PROMPTS + NUM_HELD_OUT:
        digits = generator.choices("0123456789", k=generator.randint(3, 5))
        prompts["".join(digits) + ">"] = "".join(sorted(digits))
    return [{"prompt": prompt, "ground_truth": answer} for prompt, answer in prompts.items()]


def build(steps: int, seed: int) -> asyncrl.Pipeline:
    rows = make_rows()
    train, held_out = rows[:NUM_PROMPTS], rows[NUM_PROMPTS:]
    examples = [(row["prompt"], row["ground_truth"]) for row in train]
    model = prepare("sort-digits", examples, seed=0, recipe=Recipe(target_accuracy=0.35, wrong_answers=0.0))
    return asyncrl.Pipeline(
        name="sort-digits",
        seed=seed,
        model={"path": str(model)},
        prompts=train,
        eval_prompts=held_out,
        reward=sorted_share,
        rollout={"group_size": 8, "max_prompt_tokens": 8, "max_response_tokens": 8, "max_staleness": 2},
        training={
            "steps": steps,
            "groups_per_step": 16,
            "filter": "drop",
            "learning_rate": 4.0e-4,
            "schedule": "linear",
            "final_learning_rate_factor": 0.1,
        },
        eval={"every": 50, "samples": 400},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir")
    options = parser.parse_args()
    run = build(options.steps, options.seed).launch(options.run_dir)
    print(f"run directory: {run.run_dir}")
    summary = run.wait()
    print(f"{summary['status']}: {summary['eval']['first']} of the held-out rows sorted before, {summary['eval']['last']} after")
    return 0 if summary["status"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
