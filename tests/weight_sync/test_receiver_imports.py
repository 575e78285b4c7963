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
import asyncrl.weight_sync.receiver
print(sorted({name.partition(".")[0] for name in sys.modules} & ABSENT))
print(sorted(name for name in sys.modules if name.startswith("asyncrl.")))
"""


def test_the_receiver_loads_without_the_trainers_packages():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    absent, ours = done.stdout.splitlines()
    assert absent == "[]"
    rooms = {name.split(".")[1] for name in eval(ours)}
    assert rooms <= {"errors", "protocols", "messages", "transport", "weight_sync"}
    transport = {name for name in eval(ours) if name.startswith("asyncrl.transport.")}
    assert transport <= {"asyncrl.transport.security", "asyncrl.transport.keys", "asyncrl.transport.hosts"}
