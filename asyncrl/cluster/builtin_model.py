"""Making a built-in model in a process of its own, which has seconds to do beside Ray's start.

python -m asyncrl.cluster.builtin_model builtin/arithmetic
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from asyncrl.cluster.host import limit_threads
from asyncrl.errors import AsyncrlError, RunError


class ModelMaker:
    """Begins at once. A model that is there already takes it no time."""

    def __init__(self, model: str, environment: Mapping[str, str]):
        self._model = model
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, model],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def wait(self) -> None:
        """Until the model is there; the caller has the deadline, and `close` ends this. Raises RunError where it could not be
        made."""
        _, said = self._process.communicate()
        if code := self._process.returncode:
            last = (said.decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
            raise RunError(f"the built-in model {self._model} could not be made: {last}")

    def close(self) -> None:
        """Nobody wants it any more."""
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


def main() -> None:
    limit_threads()
    from asyncrl.cluster.assembly import model_folder

    try:
        model_folder(sys.argv[1])
    except (AsyncrlError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
