"""The `asyncrl` command. Imports pipeline, services, checkpoint, ledger, transport, config, errors.

    app         commands and their options; each imports what it needs when it runs
    boundary    from errors to words on stderr (or JSON) and exit codes
    run_folder  what a run directory says, and whether its run lives
    launching, checking, watching, samples, export, serving   one file for each kind of command
    words       values as text

`asyncrl --help` must stay quick: nothing heavy is imported here.
"""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from asyncrl.cli.app import app
    from asyncrl.cli.boundary import run_command

    run_command(app)
