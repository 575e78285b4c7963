"""An MLflow store in memory that can be down, or hang."""

from __future__ import annotations

import threading


class FakeStore:
    """What it was told; `down`: every call raises; `hung`: every call waits until it is cleared."""

    metrics_per_call = 1000

    def __init__(self):
        self.runs, self.records, self.given_params, self.artifacts, self.ended = [], [], {}, [], []
        self.known, self.reopened = set(), []
        self.down = False
        self.running = threading.Event()
        self.running.set()
        self.attempts = 0

    def __call__(self, uri):
        self._answer()
        return self

    def create(self, facts):
        self._answer()
        self.runs.append(facts)
        return f"run{len(self.runs)}"

    def reopen(self, run_id):
        self._answer()
        self.reopened.append(run_id)
        return run_id in self.known

    def params(self, run_id, params):
        self._answer()
        self.given_params = dict(params)

    def metrics(self, run_id, records):
        self._answer()
        assert len(records) <= self.metrics_per_call
        self.records += records

    def artifact(self, run_id, path):
        self._answer()
        self.artifacts.append(path.name)

    def end(self, run_id, status, end_ms):
        self._answer()
        self.ended.append((run_id, status))

    def _answer(self):
        self.attempts += 1
        self.running.wait(30)
        if self.down:
            raise ConnectionError("connection refused")
