"""Calls between services."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import zmq

from asyncrl.errors import DeadlineExceeded, RemoteError, StreamClosed
from asyncrl.transport import loop_socket
from asyncrl.transport.rpc import RpcClient, RpcServer, call_once


async def add(a: int, b: int) -> int:
    return a + b


def double(array: np.ndarray) -> dict[str, np.ndarray]:
    return {"twice": array * 2}


def fail() -> None:
    raise LookupError("no such row")


def no_value() -> object:
    return object()


async def sleep_forever() -> None:
    await asyncio.Event().wait()


HANDLERS = {
    "math.add": add, "math.double": double, "fail": fail, "no_value": no_value, "sleep_forever": sleep_forever,
}  # fmt: skip


@pytest.fixture
async def server():
    server = RpcServer(HANDLERS, max_call_bytes=1_000_000)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def client(server):
    client = RpcClient(server.address)
    yield client
    await client.close()


async def test_calls_begin_in_their_order_whether_their_handlers_wait_or_not(server, client):
    begun = []

    async def waits(number: int) -> None:
        begun.append(number)

    server.add({"waits": waits, "does_not": lambda number: begun.append(number)})
    await client.call("math.add", timeout=5, a=1, b=1)  # the line is up: what follows arrives together
    calls = [client.call("waits" if number % 3 else "does_not", timeout=5, number=number) for number in range(30)]
    await asyncio.gather(*calls)
    assert begun == list(range(30))


async def test_a_call_returns_the_value_of_a_coroutine_or_a_function(client):
    assert await client.call("math.add", timeout=5, a=2, b=3) == 5
    value = await client.call("math.double", timeout=5, array=np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(value["twice"], np.arange(6).reshape(2, 3) * 2)


async def test_an_exception_becomes_a_remote_error_with_its_kind_and_text(client):
    with pytest.raises(RemoteError) as caught:
        await client.call("fail", timeout=5)
    assert (caught.value.method, caught.value.kind) == ("fail", "LookupError")
    assert "no such row" in caught.value.text


async def test_an_unknown_method_wrong_parameters_and_a_value_that_cannot_travel_are_remote_errors(client):
    for method, params, kind in [
        ("math.sub", {}, "UnknownMethod"), ("math.add", {"a": 1}, "TypeError"), ("no_value", {}, "TypeError"),
    ]:  # fmt: skip
        with pytest.raises(RemoteError) as caught:
            await client.call(method, timeout=5, **params)
        assert caught.value.kind == kind


async def test_a_slow_handler_holds_up_nobody_and_its_caller_has_a_deadline(client):
    slow = asyncio.create_task(client.call("sleep_forever", timeout=0.2))
    assert await client.call("math.add", timeout=5, a=1, b=1) == 2
    with pytest.raises(DeadlineExceeded, match="sleep_forever"):
        await slow


async def test_a_thousand_calls_outstanding_get_their_own_answers(client):
    values = await asyncio.gather(*(client.call("math.add", timeout=20, a=number, b=1) for number in range(1000)))
    assert values == list(range(1, 1001))


async def test_a_silent_address_raises_deadline_exceeded():
    client = RpcClient("tcp://127.0.0.1:1")
    with pytest.raises(DeadlineExceeded):
        await client.call("status", timeout=0.1)
    await client.close()


async def test_closing_the_client_ends_its_outstanding_calls(client):
    call = asyncio.create_task(client.call("sleep_forever", timeout=30))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(StreamClosed):
        await call
    with pytest.raises(StreamClosed):
        await client.call("math.add", timeout=1, a=1, b=1)


async def test_garbage_is_counted_and_answered_and_the_server_lives_on(server, client):
    with zmq.Context.instance().socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 1000)
        raw.connect(server.address)
        raw.send_multipart([b"x"])
        raw.send_multipart([b"12345678", b"\xc1"])
        raw.send_multipart([b"12345678", b"\x01"])
        raw.send_multipart([b"12345678", b"\x91" * 100_000])
        raw.send_multipart([b"12345678", b"\0" * 1_000_001])
        answers = [await asyncio.to_thread(raw.recv_multipart) for _ in range(4)]
    assert all(b"MalformedFrame" in answer[1] for answer in answers[:3])
    assert b"OversizedFrame" in answers[3][1]
    assert server.stats["malformed"] == 4
    assert server.stats["oversized"] == 1
    assert await client.call("math.add", timeout=5, a=1, b=1) == 2


async def test_call_once_works_from_a_thread(server):
    assert await asyncio.to_thread(call_once, server.address, "math.add", timeout=5, a=1, b=2) == 3
    with pytest.raises(RemoteError):
        await asyncio.to_thread(call_once, server.address, "fail", timeout=5)


async def test_a_server_may_be_closed_from_its_own_handler():
    server = RpcServer({})
    server.add({"stop": server.close})
    client = RpcClient(await server.start())
    assert await client.call("stop", timeout=5) is None
    await client.close()


async def test_a_restarted_server_is_reached_by_the_same_client():
    server = RpcServer({"math.add": add})
    address = await server.start()
    client = RpcClient(address)
    assert await client.call("math.add", timeout=5, a=1, b=1) == 2
    await server.close()
    again = RpcServer({"math.add": add}, bind=address)
    await again.start()
    assert await client.call("math.add", timeout=10, a=2, b=2) == 4
    await client.close()
    await again.close()


async def test_an_address_that_another_still_holds_is_taken_over_once_it_lets_go(server):
    later = RpcServer(HANDLERS)
    starting = asyncio.create_task(later.start(server.address))
    await asyncio.sleep(0.1)
    assert not starting.done()
    await server.close()
    assert await starting == server.address
    assert await call(server.address, a=1, b=2) == 3
    await later.close()


async def test_an_address_that_stays_taken_is_an_error(server, monkeypatch):
    monkeypatch.setattr(loop_socket, "HELD_SECONDS", 0.2)
    with pytest.raises(zmq.ZMQError, match="in use"):
        await RpcServer(HANDLERS).start(server.address)


async def call(address: str, **params: int) -> int:
    client = RpcClient(address)
    try:
        return await client.call("math.add", timeout=5, **params)
    finally:
        await client.close()


def test_the_server_runs_on_uvloop():
    import uvloop

    async def main() -> int:
        server = RpcServer(HANDLERS)
        client = RpcClient(await server.start())
        try:
            return await client.call("math.add", timeout=5, a=20, b=22)
        finally:
            await client.close()
            await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 42
