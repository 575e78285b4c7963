"""Reward functions as users write them, the bad ones too."""

import asyncio
import os
import re
import signal
import subprocess
import time


def by_text(response):
    """The response says what is to happen."""
    match response.split(":"):
        case ["ok", value]:
            return float(value)
        case ["raise", text]:
            raise ValueError(text)
        case ["none"]:
            return None
        case ["nan"]:
            return float("nan")
        case ["dict"]:
            return {"score": 0.5, "length": 7}
        case ["exit"]:
            raise SystemExit(3)
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["sleep"]:
            time.sleep(600)
        case ["hold"]:  # one call in C that never lets go of the interpreter's lock
            re.match(r"(a+)+b", "a" * 40)
        case ["start", file]:  # a process of its own, that nobody waits for
            with open(file, "w") as note:
                note.write(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)
        case ["pid"]:
            return os.getpid()
    return 0.0


async def by_text_async(response):
    match response.split(":"):
        case ["wait", seconds]:
            await asyncio.sleep(float(seconds))
            return 1.0
        case ["forever"]:
            await asyncio.sleep(600)
        case ["stubborn"]:
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
    return by_text(response)
