"""A bell ends a poll."""

import threading
import time

import zmq

from asyncrl.transport.bell import Bell


def test_a_ring_ends_the_poll_and_is_over_once_hushed():
    bell = Bell()
    try:
        poller = zmq.Poller()
        poller.register(bell.socket, zmq.POLLIN)
        ringer = threading.Timer(0.05, lambda: (bell.ring(), bell.ring()))
        ringer.start()
        began = time.monotonic()
        assert poller.poll(10_000)
        assert time.monotonic() - began < 5
        ringer.join()
        bell.hush()
        assert not poller.poll(0)
    finally:
        bell.close()
