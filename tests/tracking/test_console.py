"""Progress as a person sees it."""

from __future__ import annotations

import io

from asyncrl.tracking.console import ConsoleProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Time:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def progress(stream, steps=10):
    now = Time()
    return ConsoleProgress(stream, steps=steps, bound=2, now=now), now


def test_without_a_terminal_there_is_a_plain_line_every_few_seconds():
    stream = io.StringIO()
    console, now = progress(stream, steps=100)
    console.state("starting")
    for step in range(1, 31):
        now.seconds += 1
        console.log("trainer", step, {"reward/mean": 0.5, "staleness/max": 1.0})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting"
    assert 5 <= len(lines) <= 7
    assert lines[-1].startswith("step ")
    assert "reward 0.500, staleness 1 of 2" in lines[-1]
    assert "left" in lines[-1]


def test_start_up_is_said_once_and_counts_now_and_then():
    stream = io.StringIO()
    console, now = progress(stream)
    for text in ("starting", "1/3 services up", "2/3 services up", "3/3 services up", "running", "running"):
        console.state(text)
        now.seconds += 2
    console.log("rollouter", 0, {"rollouter/tokens_per_second": 1.0})
    assert stream.getvalue().splitlines() == ["starting", "3/3 services up", "running"]


def test_a_reward_that_always_fails_is_said_before_there_is_a_step():
    stream = io.StringIO()
    console, now = progress(stream)
    console.state("running")
    for failed in (0.0, 64.0, 128.0):
        now.seconds += 6
        console.log("reward", 0, {"scoring/failed": failed})
    assert stream.getvalue().splitlines()[-1].startswith("running: no step yet, 128 responses could not be scored")
    console.log("trainer", 1, {"reward/mean": 0.5})
    assert "128 responses not scored" in console.line()


def test_the_last_step_is_always_shown():
    stream = io.StringIO()
    console, _ = progress(stream, steps=3)
    for step in range(1, 4):
        console.log("trainer", step, {})
    assert stream.getvalue().splitlines()[-1].startswith("step 3/3")


def test_the_time_left_follows_the_pace_of_the_last_steps():
    console, now = progress(io.StringIO(), steps=100)
    assert console.seconds_left() is None
    now.seconds += 1000  # a slow start is forgotten
    for step in range(1, 51):
        now.seconds += 2
        console.log("trainer", step, {})
    assert console.seconds_left() == 100.0
    assert console.line() == "18:20 elapsed, 1:40 left"


async def test_a_terminal_gets_a_live_line():
    stream = Terminal()
    console, now = progress(stream)
    console.state("3/7 services up")
    now.seconds += 1
    console.log("trainer", 1, {"reward/mean": 0.25})
    console.log("rollouter", 9, {"rollouter/tokens_per_second": 12345.0})
    await console.close()
    await console.close()
    console.log("trainer", 2, {"reward/mean": 0.75})
    assert "1/10" in stream.getvalue()
    assert "12,345 tokens/s" in stream.getvalue()
    assert "0.75" not in stream.getvalue()
