"""What runs inside a server loads torch, numpy, pyzmq and msgpack, and nothing that only a trainer's environment has."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

ABSENT = {"ray", "mlflow", "pydantic", "transformers", "aiohttp", "typer"} | {"rich", "pyarrow", "safetensors", "uvloop", "yaml"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r} (made absent)", name=name)

sys.meta_path.insert(0, Absent())
import {module}
print(sorted({name.partition(".")[0] for name in sys.modules} & ABSENT))
print(sorted(name for name in sys.modules if name.startswith("asyncrl.")))
"""


TRANSPORT = {f"asyncrl.transport.{name}" for name in ("security", "keys", "hosts", "bell")}


def loaded_with(module: str) -> set[str]:
    """asyncrl's modules that come with it, where nothing else may."""
    program = PROGRAM.replace("{module}", module)
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    absent, ours = done.stdout.splitlines()
    assert absent == "[]"
    return set(eval(ours))


def test_the_receiver_loads_without_the_trainers_packages():
    ours = loaded_with("asyncrl.weight_sync.receiver")
    assert {name.split(".")[1] for name in ours} <= {"errors", "protocols", "messages", "transport", "weight_sync"}
    assert {name for name in ours if name.startswith("asyncrl.transport.")} <= TRANSPORT


def test_what_runs_in_an_sglang_server_loads_without_the_trainers_packages():
    for module in ("asyncrl.cluster.in_sglang", "asyncrl.engines.sglang.hooks", "asyncrl.engines.sglang.target"):
        ours = loaded_with(f"{module}, asyncrl.weight_sync.receiver")
        rooms = {"errors", "protocols", "messages", "transport", "weight_sync", "engines", "cluster"}
        assert {name.split(".")[1] for name in ours} <= rooms
        assert {name for name in ours if name.startswith("asyncrl.transport.")} <= TRANSPORT


def test_the_plugin_does_nothing_in_a_server_that_does_not_ask_for_it():
    program = "import asyncrl.cluster.in_sglang as it, sys; it.plugin(); print('torch' in sys.modules, 'sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr


def test_a_server_that_asks_for_a_receiver_where_it_does_not_fit_does_not_start():
    """An SGLang without one of the places that are hooked."""
    program = """
import os, sys, types
os.environ["ASYNCRL_RECEIVER"] = "tcp://127.0.0.1:1"
for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry = sys.modules["sglang.srt.plugins.hook_registry"].HookType = (
    types.SimpleNamespace(AFTER=1, AROUND=2, BEFORE=3)
)
import asyncrl.cluster.in_sglang as it
it.plugin()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "asyncrl's receiver does not fit this SGLang" in done.stderr
