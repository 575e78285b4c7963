"""Pipeline: the Python API.

`Pipeline` is a configuration plus whatever Python objects stand in it; `Pipeline.launch` returns a `Run` at once, and
`Run.wait` returns what lands in summary.json. `launch` is both in one call. `preflight` gathers the facts that `asyncrl.config`
checks a configuration against.
"""

from asyncrl.pipeline.pipeline import Pipeline, launch
from asyncrl.pipeline.run import Run

__all__ = ["Pipeline", "Run", "launch"]
