"""A cluster that is not there is named at once."""

from __future__ import annotations

import socket

import pytest

from asyncrl.cluster.ray_runtime import _refuse_where_nobody_listens
from asyncrl.errors import RunError


def test_an_address_where_nobody_listens_is_named_with_the_fix():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(RunError, match=f"{address}, and nobody listens there"):
                _refuse_where_nobody_listens(address)


def test_where_somebody_listens_ray_has_the_word():
    with socket.create_server(("127.0.0.1", 0)) as server:
        _refuse_where_nobody_listens(f"127.0.0.1:{server.getsockname()[1]}")
    _refuse_where_nobody_listens("auto")
