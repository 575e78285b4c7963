"""Every test here needs a real SGLang server: bash deploy/sglang-cpu/install.sh makes one possible without a GPU."""

from pathlib import Path

import pytest

from tests.sglang.servers import PYTHON


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(300))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason=f"no SGLang at {PYTHON}: run bash deploy/sglang-cpu/install.sh"))
