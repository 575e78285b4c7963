"""Every call comes to an outcome within a bounded time, whatever its function does, and the executor lives on."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import UserError
from asyncrl.rewards import FunctionSpec
from asyncrl.rewards.executor import FunctionExecutor

FILE = Path(__file__).with_name("user_functions.py")
SYNC, ASYNC = f"{FILE}:by_text", f"{FILE}:by_text_async"


async def scores(*responses, functions=(SYNC,), limit_seconds=0.3, concurrency=8):
    """(reward, failure) of each response, with an executor of its own that must still work afterwards."""
    specs = [FunctionSpec.of(f"f{i}", function) for i, function in enumerate(functions)]
    executor = FunctionExecutor(specs, [1.0] * len(specs), limit_seconds=limit_seconds, concurrency=concurrency)
    await executor.start()
    try:
        results = await executor.run([{"response": response} for response in responses])
        (after,) = await executor.run([{"response": "ok:1"}])
        assert after.reward == len(specs)
        return [(result.reward, result.failure) for result in results]
    finally:
        await executor.close()


async def test_failures_of_all_kinds_are_reasons_and_the_others_are_scored():
    results = await scores("ok:1", "raise:boom", "none", "nan", "dict", "exit", "sleep", "ok:2")
    assert results == [
        (1.0, None),
        (None, "f0: raised ValueError: boom"),
        (None, "f0: returned None, not a number"),
        (None, "f0: returned nan, not a finite number"),
        (0.5, None),
        (None, "f0: raised SystemExit: 3"),
        (None, "f0: timeout after 0.3 s"),
        (2.0, None),
    ]


@pytest.mark.parametrize("function", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_function_that_holds_the_interpreters_lock_is_ended_too(function):
    began = time.monotonic()
    results = await scores("ok:1", "hold", "ok:2", functions=[function])
    assert results == [(1.0, None), (None, "f0: timeout after 0.3 s"), (2.0, None)]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("function", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_sample_whose_process_dies_is_tried_once_more_and_then_failed(function):
    results = await scores("die", functions=[function])
    assert results == [(None, "f0: reward worker died (killed by SIGKILL)")]


async def test_async_calls_run_at_once_and_each_has_its_limit():
    began = time.monotonic()
    results = await scores(*["wait:0.4"] * 8, "forever", "stubborn", functions=[ASYNC], limit_seconds=0.8, concurrency=10)
    assert results == [(1.0, None)] * 8 + [(None, "f0: timeout after 0.8 s")] * 2
    assert time.monotonic() - began < 8 * 0.4 + 5


async def test_an_async_function_that_blocks_the_loop_is_blamed_alone():
    results = await scores("wait:0.2", "sleep", "wait:0.2", functions=[ASYNC])
    assert results == [(1.0, None), (None, "f0: timeout after 0.3 s"), (1.0, None)]


async def test_every_async_function_that_blocks_the_loop_is_ended_in_its_turn():
    results = await scores("sleep", "wait:0.1", "hold", "sleep", functions=[ASYNC])
    timeout = (None, "f0: timeout after 0.3 s")
    assert results == [timeout, (1.0, None), timeout, timeout]


async def test_a_call_that_came_late_is_not_blamed_before_its_time():
    """One call waits, another comes later and blocks: the second has its own time, and the first is made again."""
    executor = FunctionExecutor([FunctionSpec.of("a", ASYNC)], [1.0], limit_seconds=1.0, concurrency=8)
    await executor.start()
    first = asyncio.ensure_future(executor.run([{"response": "wait:0.9"}]))
    await asyncio.sleep(0.6)
    (blocked,) = await executor.run([{"response": "sleep"}])
    assert blocked.failure == "a: timeout after 1 s"
    assert [result.reward for result in await first] == [1.0]
    await executor.close()


async def test_sync_async_and_ready_made_functions_add_up():
    executor = FunctionExecutor(
        [
            FunctionSpec.of("a", SYNC),
            FunctionSpec.of("b", ASYNC),
            FunctionSpec.of("c", "exact_match"),
            FunctionSpec.of("d", len_of),
        ],
        [1.0, 10.0, 100.0, 1000.0],
        limit_seconds=5.0,
        concurrency=2,
    )
    await executor.start()
    try:
        (result,) = await executor.run([{"response": "ok:2", "ground_truth": "ok:2"}])
        assert result.reward == 2.0 + 20.0 + 100.0 + 4000.0
        assert executor.fields == ("response", "ground_truth")
        assert not executor.is_serial
    finally:
        await executor.close()


def len_of(response):
    return len(response)


async def test_ready_made_functions_need_no_process():
    executor = FunctionExecutor([FunctionSpec.of("a", "numeric")], [2.0], limit_seconds=5.0, concurrency=2)
    await executor.start()
    results = await executor.run([{"response": "7", "ground_truth": 7}, {"response": "7", "ground_truth": None}])
    assert [(r.reward, r.failure) for r in results] == [(2.0, None), (None, "a: ground_truth is missing")]
    assert executor.is_serial


async def test_functions_that_cannot_be_loaded_are_refused_at_the_start(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no key')\n")
    executor = FunctionExecutor([FunctionSpec.of("a", f"{tmp_path}/broken.py:judge")], [1.0], limit_seconds=1.0, concurrency=1)
    with pytest.raises(UserError, match="no key"):
        await executor.start()
    await executor.close()


async def test_no_process_is_left_after_close():
    executor = FunctionExecutor([FunctionSpec.of("a", SYNC)], [1.0], limit_seconds=5.0, concurrency=1)
    await executor.start()
    (result,) = await executor.run([{"response": "pid"}])
    await executor.close()
    await asyncio.sleep(0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.reward), 0)


async def test_what_a_function_started_ends_with_it(tmp_path):
    note = tmp_path / "pid"
    assert await scores(f"start:{note}", "ok:2") == [(None, "f0: timeout after 0.3 s"), (2.0, None)]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(note.read_text())) and psutil.Process(int(note.read_text())).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


HOST = """
import asyncio, sys, threading
from asyncrl.rewards import FunctionSpec
from asyncrl.rewards.executor import FunctionExecutor

async def work():
    executor = FunctionExecutor([FunctionSpec.of("a", sys.argv[1])], [1.0], limit_seconds=600.0, concurrency=1)
    await executor.start()
    (result,) = await executor.run([{"response": "pid"}])
    print(int(result.reward), flush=True)
    await executor.run([{"response": "hold"}])

thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
thread.start()
thread.join()
"""


async def test_a_hung_child_dies_with_its_worker():
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, SYNC, stdout=asyncio.subprocess.PIPE)
    child = int(await asyncio.wait_for(host.stdout.readline(), 30))
    host.kill()
    await host.wait()
    async with asyncio.timeout(20):
        while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_functions_print_lands_in_the_log(tmp_path):
    executor = FunctionExecutor(
        [FunctionSpec.of("a", printing)], [1.0], limit_seconds=5.0, concurrency=1, output=tmp_path / "reward-0.log"
    )
    await executor.start()
    await executor.run([{"response": "said"}])
    await executor.close()
    assert (tmp_path / "reward-0.log").read_text() == "said\n"


def printing(response):
    print(response, flush=True)
    return 1.0


async def test_functions_of_one_name_are_told_apart():
    executor = FunctionExecutor([FunctionSpec.of("m:numeric", "numeric")] * 2, [1.0, 1.0], limit_seconds=5.0, concurrency=2)
    await executor.start()
    (result,) = await executor.run([{"response": "7", "ground_truth": 7}])
    assert result.components == {"numeric": 1.0, "numeric_2": 1.0}
