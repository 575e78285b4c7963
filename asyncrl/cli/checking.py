"""`check`: a file's mistakes, or one key explained."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from asyncrl.cli.words import count, print_json, size, table
from asyncrl.config.explain import Explanation, explain_key
from asyncrl.config.facts import Facts
from asyncrl.config.plan import Plan, make_plan
from asyncrl.config.schema import Config
from asyncrl.errors import UserError


def check(file: Path | None, overrides: Sequence[str], *, explain: str | None, as_json: bool) -> int:
    """Exit code 0; whatever is wrong is raised as ConfigError."""
    if explain is not None and (file is not None or overrides):
        raise UserError("check takes a file or --explain KEY, not both: give one")
    if explain is not None:
        explanation = explain_key(explain)
        if as_json:
            print_json(explanation.to_mapping())
        else:
            print(explanation_text(explanation))
        return 0
    if file is None:
        raise UserError("check needs a pipeline file, or --explain KEY: asyncrl check pipelines/quickstart.yaml")
    config, facts = checked(file, overrides)
    plan = make_plan(config, facts)
    if as_json:
        print_json({"ok": True, "file": str(file), "notes": list(plan.notes), "config": config.to_mapping()})
        return 0
    sizes = plan.sizes
    print(f"{file}: fine ({sizes['steps']} steps of {sizes['groups_per_step']} groups, {len(plan.processes)} processes)")
    for note in plan.notes:
        print(f"note: {note}")
    return 0


def checked(file: Path, overrides: Sequence[str]) -> tuple[Config, Facts]:
    """A pipeline file that passes every check, and the facts it was held against."""
    from asyncrl.config.load import load_config
    from asyncrl.pipeline.preflight import preflight

    loaded = load_config(file, overrides)
    return loaded.config, preflight(loaded, starts=False)


def explanation_text(explanation: Explanation) -> str:
    lines = [explanation.key, *textwrap.wrap(explanation.sentence, 100, initial_indent="  ", subsequent_indent="  ")]
    if not explanation.parts or explanation.choices:
        lines.append(f"  takes:   {explanation.takes}")
    if explanation.required:
        lines.append("  default: none, it is required")
    elif explanation.default is not None:
        lines.append(f"  default: {explanation.default}")
    for heading, pairs in (("choices", explanation.choices), ("keys", explanation.parts)):
        if pairs:
            width = max(len(name) for name, _ in pairs)
            lines += [f"  {heading}:", *(f"    {name.ljust(width)}  {sentence}".rstrip() for name, sentence in pairs)]
    return "\n".join(lines)


def _updates(number: int | None) -> str:
    return f"{number} optimizer update" if number == 1 else f"{number} optimizer updates"


def plan_text(plan: Plan) -> str:
    """The plan for a person."""
    model, data, sizes, machine = plan.model, plan.data, plan.sizes, plan.machine
    facts = [("architecture", ""), ("parameters", "parameters"), ("context_tokens", "tokens of context")]
    about = [f"{count(model[key]) if unit else model[key]} {unit}".strip() for key, unit in facts if model[key] is not None]
    rows = {name: "" if data[f"{name}_rows"] is None else f" ({count(data[f'{name}_rows'])} rows)" for name in ("train", "eval")}
    lines = [
        f"plan of {plan.name}: nothing was started",
        "",
        f"model    {model['path']}, {model['dtype']}" + (f" ({', '.join(about)})" if about else ""),
        f"data     {data['train']}{rows['train']}; evaluation: {data['eval'] or 'off'}{rows['eval'] if data['eval'] else ''}",
        f"step     {sizes['groups_per_step']} groups, {sizes['responses_per_step']} responses, at most "
        f"{count(sizes['most_tokens_per_step'])} tokens, {_updates(sizes['updates_per_step'])}",
        f"run      {sizes['steps']} steps, {count(sizes['groups'])} groups, {sizes['versions']} policy versions, at most "
        f"{sizes['live_groups']} groups under way",
        f"bound    {plan.staleness}",
        f"queue    {sizes['queue_items_per_topic']} messages and {size(sizes['queue_bytes_per_topic'])} per topic",
        f"machine  {machine['cores']} cores, {machine['gpus']} GPUs, {size(machine['memory_bytes'])} of memory; "
        f"estimate for the run: {size(plan.memory_bytes)}",
        "",
        table(
            ("process", "work", "device", "memory", "ports"),
            [(p.name, p.work, p.device, size(p.memory_bytes), p.ports) for p in plan.processes],
        ),
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])
