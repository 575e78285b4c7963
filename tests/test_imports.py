"""The rooms, and what the command line may load."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "mlflow", "transformers")


def loaded_by(code: str) -> str:
    """The heavy modules that a fresh interpreter has after running `code`."""
    script = f"{code}\nimport sys\nprint('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.rpartition("HEAVY")[2].strip()


@pytest.mark.parametrize(
    "code",
    [
        "import asyncrl",
        "import asyncrl.cli.app",
        "import asyncrl.config, asyncrl.config.checks, asyncrl.config.plan, asyncrl.config.explain",
        "import asyncrl; asyncrl.Pipeline",
        "import asyncrl.cli.launching, asyncrl.cli.watching, asyncrl.cli.samples, asyncrl.cli.auditing",
        "import asyncrl.algorithms",
        "from asyncrl.cli.algorithms import algorithms; algorithms(None, as_json=False)",
        "import asyncrl; asyncrl.Pipeline.from_yaml('pipelines/quickstart.yaml')",
        "import asyncrl.transport.rpc, asyncrl.ledger.audit, asyncrl.services.supervisor",
    ],
)
def test_no_torch_ray_mlflow_or_transformers_is_loaded(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert loaded_by(code) == ""


def test_help_is_quick_and_says_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "from asyncrl.cli import main; main()", "--help"]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        times.append(time.perf_counter() - began)
    assert "asyncrl launch pipelines/quickstart.yaml" in done.stdout
    with capsys.disabled():
        print(f"\nasyncrl --help: {min(times):.2f} s (the limit on an idle machine is 0.5 s)")


def test_every_import_goes_down_and_every_vendor_stays_at_home() -> None:
    script = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
