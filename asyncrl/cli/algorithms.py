"""`algorithms`: what `algorithm` can name, what each needs of a run, and one of them in full.

The table reads names and needs from the entries, without torch. A name's formula and source are its function's docstring.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

from asyncrl.cli.words import print_json, table
from asyncrl.config.built import NOT_BUILT
from asyncrl.config.entries import Advantage, Aggregation, Correction, Entry, Kl, KlEstimator, Loss, entries_of
from asyncrl.config.problems import bounds, type_words
from asyncrl.config.walk import names_of, nearest, node
from asyncrl.errors import UserError

KINDS = {"advantage": Advantage, "loss": Loss, "correction": Correction}
WITHOUT_SENTENCE = {
    "proximal": "Anchor of the trust region.",
    "aggregation": "From token values to one loss, over the global batch.",
    "kl": "Divergence from the reference per token; with + the gradient is k2's.",
}


@dataclass(frozen=True)
class Known:
    """One name. in_runs: whether a pipeline file may name it in this build; every name can be called from Python."""

    kind: str
    name: str
    needs: tuple[str, ...]
    in_runs: bool
    sentence: str


def algorithms(name: str | None, *, as_json: bool) -> int:
    """Print all names, or every one that is called `name`."""
    everything = list(every_name())
    if name is None:
        if as_json:
            print_json({"algorithms": [asdict(known) for known in everything]})
        else:
            print(overview(everything))
        return 0
    chosen = [known for known in everything if known.name == name]
    if not chosen:
        names = sorted({known.name for known in everything})
        raise UserError(f"there is no algorithm {name!r}: the nearest known one is {nearest(name, names)} (asyncrl algorithms)")
    details = [detail(known) for known in chosen]
    if as_json:
        print_json({"algorithms": details})
    else:
        print("\n\n".join(detail_text(values) for values in details))
    return 0


def every_name() -> Iterator[Known]:
    """In the order of the reference, kind by kind."""
    for kind, union in KINDS.items():
        for name, cls in entries_of(union).items():
            sentence = str(cls.model_fields["name"].description)
            needs = tuple(cls.requires.words())
            yield Known(kind, name, needs, name not in NOT_BUILT[f"algorithm.{kind}"], sentence)
    for name in names_of(node("algorithm.proximal")):
        yield Known("proximal", name, (), name not in NOT_BUILT["algorithm.proximal"], WITHOUT_SENTENCE["proximal"])
    for name in get_args(Aggregation):
        yield Known("aggregation", name, (), True, WITHOUT_SENTENCE["aggregation"])
    for name in get_args(KlEstimator):
        yield Known("kl", name, ("reference",), True, WITHOUT_SENTENCE["kl"])


def overview(everything: list[Known]) -> str:
    runs = {True: "yes", False: "not yet"}
    rows = [(known.kind, known.name, ", ".join(known.needs) or "-", runs[known.in_runs]) for known in everything]
    return "\n".join(
        [
            table(("kind", "name", "needs", "in runs"), rows),
            "",
            "asyncrl algorithms NAME prints the formula, its parameters and its source.",
            "Every name can be called from Python (asyncrl.algorithms); so can your own, as pkg.mod:fn, in a file too.",
        ]
    )


def detail(known: Known) -> dict[str, Any]:
    """Everything of one name, as plain values. Loads torch."""
    function = _function(known)
    formula, _, source = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    module = inspect.getmodule(function)
    return {
        **asdict(known),
        "formula": " ".join(formula.split()),
        "source": " ".join(source.split()),
        "parameters": list(_parameters(known)),
        "function": f"{module.__name__ if module else ''}.{function.__name__}",
    }


def detail_text(values: dict[str, Any]) -> str:
    """One name for a person."""
    lines = [f"{values['name']} ({values['kind']})"]
    for heading in ("sentence", "formula", "source"):
        if values[heading]:
            label = "about" if heading == "sentence" else heading
            lines += textwrap.wrap(values[heading], 110, initial_indent=f"  {label + ':':<9}", subsequent_indent=" " * 11)
    lines.append(f"  needs:   {', '.join(values['needs']) or 'nothing'}")
    lines.append(f"  in runs: {'yes' if values['in_runs'] else 'not yet; call it from Python'}")
    lines.append(f"  code:    {values['function']}")
    if values["parameters"]:
        lines.append("  parameters:")
        rows = [(item["name"], item["default"], item["takes"], item["sentence"]) for item in values["parameters"]]
        lines += textwrap.indent(table(("name", "default", "takes", ""), rows), "    ").splitlines()
    return "\n".join(lines)


def _parameters(known: Known) -> Iterator[dict[str, str]]:
    if known.kind not in (*KINDS, "kl"):
        return
    cls: type[Entry] = Kl if known.kind == "kl" else entries_of(KINDS[known.kind])[known.name]
    for name, info in cls.model_fields.items():
        if name == "name":
            continue
        default = "required" if info.is_required() else info.get_default(call_default_factory=True)
        text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        takes = ", ".join([type_words(info.annotation), *bounds(info.metadata)])
        yield {"name": name, "default": text, "takes": takes, "sentence": info.description or ""}


def _function(known: Known) -> Any:
    """The function that computes it."""
    from asyncrl.algorithms import advantages, aggregation, corrections, divergence, losses, proximal

    if known.kind == "aggregation":
        return aggregation.response_coefficients
    if known.kind == "kl":
        return divergence.ESTIMATORS[known.name.removesuffix("+")]
    if known.kind == "proximal":
        return proximal.PROXIMALS[known.name].log_probs
    if known.kind == "loss":
        return losses.LOSSES[known.name].values
    registry = advantages.ADVANTAGES if known.kind == "advantage" else corrections.CORRECTIONS
    return registry[known.name]
