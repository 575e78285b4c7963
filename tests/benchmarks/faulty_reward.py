"""The reward function of `reward_faults`, in a file that loads nothing else."""

import time


def faulty(response):
    """ "hang:…", "raise:seconds" or "ok:seconds"."""
    kind, _, seconds = response.partition(":")
    time.sleep(3600.0 if kind == "hang" else float(seconds))
    if kind == "raise":
        raise ValueError("not today")
    return 1.0
