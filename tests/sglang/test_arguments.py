"""A real environment is found fit, and its own list of arguments decides what may be passed through."""

from __future__ import annotations

import pytest

from asyncrl.engines.sglang.process import OwnServers
from asyncrl.errors import UserError
from tests.sglang.servers import options


async def test_what_the_real_server_knows_is_passed_through_and_what_it_does_not_is_refused(tmp_path):
    known = options(tmp_path, further={"chunked_prefill_size": 256, "enable-metrics": True})
    await OwnServers(known, tmp_path / "log").examine()
    unknown = options(tmp_path, further={"chunked-prefil-size": 256})
    with pytest.raises(UserError, match="did you mean chunked-prefill-size"):
        await OwnServers(unknown, tmp_path / "log").examine()
