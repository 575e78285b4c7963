"""The virtual-time loop."""

import asyncio
import itertools
import time

import pytest

from asyncrl.simulation.loop import Stuck, VirtualClock, run_virtual


def test_an_hour_passes_in_no_time():
    async def main():
        clock = VirtualClock()
        began = clock.now()
        await asyncio.sleep(3600)
        return clock.now() - began

    real = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.monotonic() - real < 1


def test_events_happen_in_the_order_of_their_times():
    async def main():
        order = []

        async def after(seconds):
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(after(3), after(1), after(2))
        return order

    assert run_virtual(main()) == [1, 2, 3]


def test_time_stands_still_while_something_can_run():
    async def main():
        clock = VirtualClock()
        for _ in range(1000):
            await asyncio.sleep(0)
        return clock.now()

    assert run_virtual(main()) == 0


def test_a_timeout_fires_at_its_time():
    async def main():
        clock = VirtualClock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return clock.now()

    assert run_virtual(main()) == pytest.approx(5)


def test_a_wait_that_nobody_can_end_is_an_error_and_not_a_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_virtual(main())


def test_a_program_that_goes_on_forever_passes_its_limit():
    async def main():
        for _ in itertools.count():
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        run_virtual(main(), limit_seconds=100)
