"""The command's outermost boundary: errors become words and exit codes here, and nowhere else.

exit code 0    it went as asked
          1    a run failed, or an audit found something
          2    the user's mistake: a wrong option, file, key or value
          130  interrupted: stop, Ctrl-C, SIGTERM
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl.errors import AsyncrlError, ConfigError, Interrupted, UserError

if TYPE_CHECKING:
    import typer

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


def run_command(app: typer.Typer) -> NoReturn:
    """Run the command line of this process and exit."""
    as_json = "--json" in sys.argv[1:]
    try:
        code = app(standalone_mode=False)
    except AsyncrlError as error:
        say_error(error, as_json=as_json)
        code = exit_code(error)
    except KeyboardInterrupt:
        say_error(Interrupted("interrupted"), as_json=as_json)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left: nothing to say, and nobody to say it to
        code = 0
    except Exception as error:  # boundary: typer's own usage errors are known by their exit code, everything else is a bug
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            raise SystemExit(EXIT_USER) from None
        usage = getattr(getattr(error, "ctx", None), "get_usage", None)
        say_error(UserError(error.format_message()), as_json=as_json, usage=usage() if usage else None)
        code = error.exit_code
    raise SystemExit(code if isinstance(code, int) else 0)


def exit_code(error: AsyncrlError) -> int:
    """The exit code that an error of ours stands for."""
    if isinstance(error, UserError):
        return EXIT_USER
    return EXIT_INTERRUPTED if isinstance(error, Interrupted) else EXIT_FAILED


def say_error(error: AsyncrlError, *, as_json: bool, usage: str | None = None) -> None:
    """The error without a traceback: as text on stderr, or as one JSON object on stdout."""
    if as_json:
        print(json.dumps(error_mapping(error), ensure_ascii=False))
        return
    if usage:
        print(usage, file=sys.stderr)
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        lines = [f"{len(error.problems)} problems:", *(f"  {line}" for line in lines)]
    print(f"error: {lines[0]}", *lines[1:], sep="\n", file=sys.stderr)


def error_mapping(error: AsyncrlError) -> dict[str, Any]:
    """What `--json` prints for an error."""
    found: dict[str, Any] = {"ok": False, "exit_code": exit_code(error), "error": str(error), "kind": type(error).__name__}
    if isinstance(error, ConfigError):
        found["problems"] = [
            {"key": problem.key, "message": problem.message, "line": problem.line, "source": problem.source}
            for problem in error.problems
        ]
    return found
