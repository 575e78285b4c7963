"""What each correction is worth where data is very stale: the quickstart's task at a learning rate of 5e-4 held constant, every
token up to 16 versions old, the same steps, three seeds. One line a run; the means at the end.

- the default correction ends no worse than none, by the mean over the seeds;
- and within 5 points of the same at staleness 2.

A run takes about 40 s on two cores; `--presets` chooses among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from asyncrl.config.entries import Correction, General, StalenessTis, entries_of
from tests.end_to_end.runs import Launched

DEFAULT, NEAR = StalenessTis().name, "staleness_2"
PRESETS = [name for name in entries_of(Correction) if name != General().name]
STALE, LITTLE_STALE = 16, 2
WITHIN = 0.05
SETTINGS = (
    "training.learning_rate=5.0e-4",
    "training.schedule=constant",
    "training.final_learning_rate_factor=0",
    "eval.every=0",
    "queue.capacity=512",
)


def last_evaluation(correction: str, bound: int, seed: int) -> dict[str, float]:
    sets = (*SETTINGS, f"algorithm.correction={correction}", f"rollout.max_staleness={bound}", f"seed={seed}")
    with tempfile.TemporaryDirectory() as folder:
        run = Launched(Path(folder) / "run", *sets, short=False)
        if run.wait(600) != 0:
            raise SystemExit(run.text)
        summary = run.summary
        return {"eval": summary["eval"]["last"], "staleness": summary["staleness"]["mean"]}


def measure(presets: list[str], seeds: list[int]) -> dict[str, float]:
    ends = {}
    for name in (NEAR, *presets):
        correction, bound = (DEFAULT, LITTLE_STALE) if name == NEAR else (name, STALE)
        found = []
        for seed in seeds:
            found.append(last_evaluation(correction, bound, seed))
            print(f"{name:22} seed {seed}: eval {found[-1]['eval']:.3f}, staleness {found[-1]['staleness']:.1f}", flush=True)
        ends[name] = round(statistics.fmean(each["eval"] for each in found), 4)
    return ends


def judge(ends: dict[str, float]) -> dict[str, object]:
    ours, without, near = ends[DEFAULT], ends["none"], ends[NEAR]
    checks = {
        "no_worse_than_none": {"value": ours, "limit": without, "ok": ours >= without},
        "near_staleness_2": {"value": ours, "limit": round(near - WITHIN, 4), "ok": ours >= near - WITHIN},
    }
    ok = all(check["ok"] for check in checks.values())
    ratio = round(ours / without, 3)
    return {
        "name": "stress",
        "ratio": ratio,
        "ours": ours,
        "baseline": without,
        "limit": 1.0,
        "ok": ok,
        "checks": checks,
        "ends": ends,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    chosen = parser.parse_args()
    presets = list(dict.fromkeys(["none", DEFAULT, *chosen.presets]))
    result = judge(measure(presets, chosen.seeds))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
