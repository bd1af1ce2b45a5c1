"""`qaudit list`, `explain` and `doctor`: what there is, what it means, what this machine can do.

Each kind of list loads what it lists alone.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AsJson, audit_at, option
from qaudit.cli.terminal import print_result
from qaudit.errors import MachineError, UsageError
from qaudit.settings import OUTPUT, settings_of
from qaudit.support.keys import first_of, nearest
from qaudit.version import __version__

if TYPE_CHECKING:
    from qaudit.types import AuditRecord, Policy


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            help="schemes, sets, settings, formats, merges, diagnostics, families, recipes, "
            "policies, tasks, lm-eval (all of its tasks) or rules."
        ),
    ] = "schemes",
    as_json: AsJson = False,
    quiet: Annotated[bool, option(OUTPUT, "Only names, one a line.", "--quiet", "-q")] = False,
) -> int:
    """List what is registered, one a line, with its description.

    Example: qaudit list schemes
    """
    print_result(listing(kind, as_json=as_json, quiet=quiet))
    return 0


def listing(kind: str, *, as_json: bool = False, quiet: bool = False) -> str:
    """Return the names of one kind, each with the first line of its description."""
    if kind not in _KINDS:
        raise UsageError(f"there is no list of `{kind}`", hint=nearest(kind, _KINDS))
    rows = _KINDS[kind]()
    if as_json:
        return json.dumps(rows, indent=1)
    if quiet:
        return "\n".join(rows)
    from qaudit.report.terminal import hanging

    lines, width = [], max(map(len, rows), default=0)
    for name, text in rows.items():
        if isinstance(text, dict):
            option = f"; {text['option']}" if text["option"] else ""
            text = f"{text['help']} [{text['type']}; default: {text['default']}{option}]"
        head = f"{name:<{width}}  "
        lines.append(hanging(head, text) if sys.stdout.isatty() else head + text)
    return "\n".join(lines)


def _schemes() -> dict[str, str]:
    from qaudit.core.registry import schemes

    texts, broken = _classes("qaudit.core.registry:schemes"), schemes().broken()
    for name in schemes():
        if name not in broken:
            parameters = [
                f.name if f.default is MISSING else f"{f.name}={str(f.default).lower()}"
                for f in fields(schemes()[name])
                if f.name != "kv"  # of every scheme: docs/schemes.md
            ]
            texts[name] += f" [{', '.join(parameters)}]" if parameters else ""
    return texts


def _classes(registry: str) -> dict[str, str]:
    registered = resolve_name(registry)()
    broken = registered.broken()
    usable = {name: registered[name] for name in registered if name not in broken}
    return _described(usable, broken)


def _described(
    usable: Mapping[str, type[Any]], broken: Mapping[str, MachineError]
) -> dict[str, str]:
    """Return the first lines of docstrings, and why plug-ins of others cannot be used."""
    texts = {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in usable.items()}
    return texts | {name: error.message for name, error in broken.items()}


def _settings() -> dict[str, dict[str, str]]:
    return {
        name: {
            "help": entry.help,
            "type": entry.kind,
            "default": entry.shown_default,
            "option": entry.option,
            "variable": entry.variable,
        }
        for name, entry in settings_of().items()
    }


def _formats() -> dict[str, str]:
    from qaudit.formats.packing import formats, further_readers, readers
    from qaudit.report import diff, folder, gate

    texts = _classes("qaudit.formats.packing:formats")
    uses: dict[str, tuple[str, ...]] = {
        "export": tuple(formats()),
        "scan --shipped": (*readers(), *further_readers(), "gguf"),
        "report": tuple(folder.FORMATS),
        "gate": tuple(gate.FORMATS),
        "diff": tuple(diff.FORMATS),
    }
    names = dict.fromkeys(name for group in uses.values() for name in group)
    used = {name: [use for use, group in uses.items() if name in group] for name in names}
    return {name: f"{texts.get(name, '')} [{', '.join(used[name])}]".strip() for name in names}


_KINDS: dict[str, Callable[[], Mapping[str, str | dict[str, str]]]] = {
    "schemes": _schemes,
    "sets": lambda: {
        name: ", ".join(texts)
        for name, texts in resolve_name("qaudit.core.registry:scheme_sets")().items()
    },
    "settings": _settings,
    "formats": _formats,
    "merges": lambda: _classes("qaudit.core.registry:merges"),
    "diagnostics": lambda: _described(
        resolve_name("qaudit.diagnostics.diagnostic:diagnostics")(),
        resolve_name("qaudit.diagnostics.diagnostic:broken")(),
    ),
    "families": lambda: {
        family.family: family.description
        for family in resolve_name("qaudit.families:all_families")()
    },
    "recipes": lambda: resolve_name("qaudit.recipe.table:shipped_recipes")(),
    "policies": lambda: resolve_name("qaudit.policy:descriptions")(),
    "tasks": lambda: resolve_name("qaudit.items.harness:descriptions")(),
    "lm-eval": lambda: resolve_name("qaudit.items.harness:all_tasks")(),
    "rules": lambda: {
        code: rule.title for code, rule in resolve_name("qaudit.types:CODES").items()
    },
}


Texts = dict[str, tuple[str, ...]]
_WHERE = "Where its names are from"
NOTE = "QA003"


def explain(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="A finding's code, a rule of a policy, a metric, a scheme, or words of a note.",
        ),
    ],
    audit: Annotated[
        str | None,
        option(_WHERE, "An audit: its notes, and the rules of its policy.", show_default="none"),
    ] = None,
    policy: Annotated[
        str | None,
        option(_WHERE, "A policy whose rules are explained.", show_default="those that ship"),
    ] = None,
) -> int:
    """Say what a code, a rule, a metric, a scheme or a note means, and what to do.

    Example: qaudit explain four-bit-tail QA029
    """
    from qaudit.policy import PRESETS, policy_inside, policy_named, preset
    from qaudit.report.terminal import filled
    from qaudit.saved.audits import read_audit

    saved = read_audit(audit_at(audit)) if audit is not None else None
    policies = tuple(map(preset, PRESETS)) if policy is None else (policy_named(policy),)
    if policy is None and audit and saved and saved.plan.recipe.policy not in PRESETS:
        place = Path(audit) if Path(audit).is_dir() else Path(audit).parent
        policies = (policy_inside(saved.plan.recipe.policy, place), *policies)
    texts = _known(policies)
    paragraphs = ["\n\n".join(map(filled, _explained(name, texts, saved))) for name in names]
    print_result("\n\n".join(paragraphs) + "\n")
    return 0


def _explained(name: str, texts: Texts, saved: AuditRecord | None) -> tuple[str, ...]:
    key = name if name in texts else name.upper()
    if key in texts:
        return texts[key]
    from qaudit.core.registry import parse_scheme, short_forms, unknown
    from qaudit.errors import SchemeError

    with suppress(SchemeError):
        scheme = parse_scheme(name)
        about = (type(scheme).__doc__ or "").partition("\n")[0]
        return f"{scheme.short} is `{scheme.spec}`.", about
    if saved is not None and (notes := _notes(name, saved)):
        return *notes, *texts[NOTE]
    hint = unknown("name", name, [*map(str.lower, texts), *short_forms()], ()).hint
    if hint.startswith("there are:"):
        hint = "`qaudit list rules` has the codes, `qaudit list schemes` the schemes"
    if saved is None and " " in name:
        hint = "a note is explained with the audit that has it: `--audit FOLDER`"
    raise UsageError(f"nothing is called `{name}`", hint=hint)


def _notes(words: str, saved: AuditRecord) -> list[str]:
    """Return the notes of an audit that have some words, and what they are beside."""
    places: dict[str, list[str]] = {}
    for row in saved.measurements:
        for note in row.notes:
            places.setdefault(note, []).append(f"{row.subject} at {row.scheme}")
    for note in saved.plan.notes:
        places.setdefault(note, []).append("the plan")
    return [
        f"{note}: a note about {first_of(place)}."
        for note, place in places.items()
        if words.casefold() in note.casefold()
    ]


def _known(policies: Sequence[Policy]) -> Texts:
    """Return what is said of codes, of metrics, and of the rules of policies with all margins."""
    from qaudit.types import CODES, METRICS, bound_of

    texts: Texts = {code: (f"{code}: {e.title}.", e.help) for code, e in CODES.items() if e.title}
    to_do = {m: (f"What to do: {r.hint}.",) if r.hint else () for m, r in METRICS.items()}
    for metric, record in METRICS.items():
        title = f"{metric} ({record.code}): {record.title}."
        texts[metric] = title, record.reason, *to_do[metric]
    margins: dict[tuple[str, str], list[str]] = {}
    for policy in policies:
        for rule in policy.rules:
            bound = bound_of(rule.margin, METRICS[rule.metric].unit)
            of_policy = margins.setdefault((rule.name, rule.metric), [])
            of_policy.append(f"{bound} in `{policy.name}` ({rule.level})")
    for (name, metric), bounds in margins.items():
        record = METRICS[metric]
        texts[name] = (
            *texts.get(name, ()),
            f"{name} is a rule about `{metric}`, with a margin of {', '.join(bounds)}.",
            f"It fails where {record.title} ({record.code}). {record.reason}",
            *to_do[metric],
        )
    return {name: tuple(filter(None, lines)) for name, lines in texts.items()}


_MARKS = {"ok": " ", "without": "-", "fault": "!"}


def doctor(as_json: AsJson = False) -> int:
    """Check device, memory, libraries, Hub and cache, and print what to install for what.

    Exits with 4 when something is broken that scans need.

    Example: qaudit doctor
    """
    from qaudit.engine.doctor import examine
    from qaudit.report.terminal import hanging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries print when they load
        facts = examine()
    width = max(len(fact.name) for fact in facts)
    lines = [f"qaudit {__version__}"]
    for about, group in groupby(facts, key=lambda fact: fact.about):
        lines += ["", about]
        for fact in group:
            head = f"{_MARKS[fact.state]} {fact.name:<{width}}  "
            lines.append(hanging(head, fact.value))
            lines += [hanging(" " * len(head), fact.hint)] if fact.hint else []
    rows = {"qaudit": __version__, "facts": [asdict(fact) for fact in facts]}
    print_result(json.dumps(rows, indent=1) if as_json else "\n".join(lines))
    return 4 if any(fact.state == "fault" for fact in facts) else 0
