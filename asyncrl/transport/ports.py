"""Ports that a service may take now and have again after its process has ended."""

from __future__ import annotations

import contextlib
import random
import socket

from asyncrl.errors import RunError

PORTS = range(20_000, 32_000)  # outside the ranges from which systems draw ports for outgoing connections


def free_port(host: str) -> int:
    """A port that nobody has now, of those that no outgoing connection is given: it can be had again after this process."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
    raise RunError(f"no port of {PORTS.start}–{PORTS.stop - 1} is free on {host}: end what holds them (`ss -ltn` lists it)")
