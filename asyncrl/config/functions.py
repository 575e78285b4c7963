"""User functions named in a pipeline file: ``pkg.mod:fn`` or ``path/file.py:fn``.

A file is loaded once per process, under a module name made from its path, so that two names from one file share its globals.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import UserError


def names_function(text: str) -> bool:
    """Whether the text has the form of a function's name, as opposed to a file, a folder or a built-in."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and bool(place) and name.isidentifier()


def load_function(text: str, key: str) -> Callable[..., Any]:
    """The function that `text` names. `key` is the configuration key that holds it, for the message.

    Raises UserError when the file or module cannot be imported, or has no callable of that name.
    """
    if not names_function(text):
        raise UserError(f"{key} is {text!r}, which is not a function's name: write pkg.mod:fn or path/file.py:fn")
    place, _, name = text.rpartition(":")
    module = _load_file(Path(place), key) if place.endswith(".py") else _load_module(place, key)
    function = getattr(module, name, None)
    if function is None:
        known = ", ".join(sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))[:8])
        raise UserError(f"{key} names {name!r}, which {place} does not define: it has {known or 'no function'}")
    if not callable(function):
        raise UserError(f"{key} names {text}, a {type(function).__name__}: give the name of a function")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path, key: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{key} names {path}, and there is no such file: give its path from the working directory")
    name = f"asyncrl_user_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # boundary: the user's file runs here, and may raise anything
        del sys.modules[name]
        raise UserError(f"{key}: importing {path} raised {type(error).__name__}: {error}; mend the file") from error
    return module


def _load_module(place: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:  # boundary: the user's module runs here, and may raise anything
        raise UserError(
            f"{key}: importing {place} raised {type(error).__name__}: {error}; mend the module, or put its folder on PYTHONPATH"
        ) from error
