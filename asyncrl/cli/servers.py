"""`servers list | add | remove`: the inference servers of a live run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncrl.cli.words import print_json, table
from asyncrl.config.section import HTTP_PATTERN, TCP_PATTERN
from asyncrl.errors import RemoteError, RunError, TransportError, UserError
from asyncrl.pipeline.run_folder import RunFolder

SECONDS = 70.0  # of a server that joins: its answer, and ParameterSync's


def list_servers(run: Path, *, as_json: bool) -> int:
    found = _ask(run, "servers")
    if as_json:
        print_json({"servers": found})
        return 0
    head = ("server", "state", "version", "running", "waiting", "KV in use", "pause ms", "transfer ms", "url", "")
    print(table(head, [_row(server) for server in found]))
    return 0


def add_server(run: Path, url: str, receiver: str | None, *, as_json: bool) -> int:
    for text, pattern, form in ((url, HTTP_PATTERN, "http://host:port"), (receiver, TCP_PATTERN, "tcp://host:port")):
        if text is not None and not re.fullmatch(pattern, text):
            raise UserError(f"{text!r} is no address of the form {form}: write it so")
    name = _ask(run, "add_server", url=url, receiver=receiver)
    if as_json:
        print_json({"name": name, "url": url})
    else:
        print(f"{url} is {name}: it takes requests once it has confirmed the current version (asyncrl servers list {run})")
    return 0


def remove_server(run: Path, name: str, *, as_json: bool) -> int:
    _ask(run, "remove_server", name=name)
    if as_json:
        print_json({"name": name, "state": "RETIRED"})
    else:
        print(f"{name} takes no more requests; those that it has end there")
    return 0


def _ask(run: Path, method: str, **params: Any) -> Any:
    folder = RunFolder.open(run)
    if not folder.lives:
        raise UserError(f"{run} holds no live run ({folder.status()['state']}), so it has no servers: launch it")
    try:
        return folder.ask(method, timeout=SECONDS, **params)
    except RemoteError as error:
        if error.kind == UserError.__name__:
            raise UserError(error.text) from error
        raise RunError(error.text) from error
    except TransportError as error:
        raise RunError(f"the run does not answer ({error}): see {run / 'logs'}") from error


def _row(server: dict[str, Any]) -> tuple[Any, ...]:
    load = server.get("load") or {}
    use = f"{load['kv_use']:.0%}" if "kv_use" in load else None
    costs = (f"{server[cost]:.1f}" if cost in server else None for cost in ("pause_ms", "transfer_ms"))
    counts = (load.get("running"), load.get("waiting"))
    return (server["name"], server["state"], server["version"], *counts, use, *costs, server["url"], server["reason"])
