"""Every test here needs a real SGLang server: bash deploy/sglang-cpu/install.sh makes one possible without a GPU."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.sglang.servers import PYTHON, RunningServer, serving


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(300))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason=f"no SGLang at {PYTHON}: run bash deploy/sglang-cpu/install.sh"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Iterator[RunningServer]:
    """One server of a tiny model for all tests that need none of their own. Its owner lives on a loop of its own."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model(folder / "model")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(240)

    context = serving(folder / "model", folder)
    try:
        server = do(context.__aenter__())
        yield server
    finally:
        do(context.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture
def incarnation(_incarnations: Iterator[int]) -> int:
    """Each test is a new start of the trainer, as far as the shared server is concerned."""
    return next(_incarnations)


@pytest.fixture(scope="session")
def _incarnations() -> Iterator[int]:
    return itertools.count(1)
