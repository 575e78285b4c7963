"""What every section of the schema is made of: its strictness, and the kinds of values that fields share."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Strict (no coercion), frozen, and closed to unknown keys. Build one from YAML through `asyncrl.config.load_config`, which
    reports every problem at once, with its line."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


HUGE = 2**31
"""Whole numbers stay below: they are counted in arrays, in SQLite and in msgpack, whose integers end."""


def _countable(value: int) -> int:
    if value >= HUGE:
        raise PydanticCustomError("huge", "too large to count")
    return value


Whole = Annotated[int, AfterValidator(_countable)]


def _whole_or_auto(value: object) -> object:
    """Judged as one, so that a wrong value is one problem, not one for each kind that it might have been."""
    if value == "auto":
        return value
    if type(value) is not int or value < 0:
        raise PydanticCustomError("whole_or_auto", "neither a whole number nor auto")
    return _countable(value)


WholeOrAuto = Annotated[Annotated[int, Ge(0)] | Literal["auto"], BeforeValidator(_whole_or_auto)]

NAME_PATTERN, HTTP_PATTERN, TCP_PATTERN = r"^[A-Za-z0-9._-]+$", r"^http://[^/?#\s]+$", r"^tcp://[^/?#\s]+:[0-9]+$"
PATTERNS = {
    NAME_PATTERN: "of letters, digits, dots, dashes and underscores",
    HTTP_PATTERN: "http://host:port",
    TCP_PATTERN: "tcp://host:port",
}
"""What a text must look like, in words."""
