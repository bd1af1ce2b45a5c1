"""`qaudit explain`: what a finding, a rule, a metric or a note says, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qaudit.cli.options import audit_at, option
from qaudit.cli.terminal import print_result
from qaudit.errors import UsageError
from qaudit.support.keys import first_of

if TYPE_CHECKING:
    from qaudit.types import AuditRecord, Policy

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
    from qaudit.report.terminal import filled
    from qaudit.saved.audits import read_audit

    saved = read_audit(audit_at(audit)) if audit is not None else None
    texts = _known(_policies(policy, saved, audit))
    paragraphs = ["\n\n".join(map(filled, _explained(name, texts, saved))) for name in names]
    print_result("\n\n".join(paragraphs) + "\n")
    return 0


def _policies(
    policy: str | None, saved: AuditRecord | None, audit: str | None
) -> tuple[Policy, ...]:
    from qaudit.policy import PRESETS, policy_inside, policy_named, preset

    if policy is not None:
        return (policy_named(policy),)
    shipped = tuple(map(preset, PRESETS))
    if saved is None or audit is None or saved.plan.recipe.policy in PRESETS:
        return shipped
    place = Path(audit) if Path(audit).is_dir() else Path(audit).parent
    return (policy_inside(saved.plan.recipe.policy, place), *shipped)


def _explained(name: str, texts: Texts, saved: AuditRecord | None) -> tuple[str, ...]:
    key = name if name in texts else name.upper()
    if key in texts:
        return texts[key]
    described = _scheme(name) or _note(name, texts, saved)
    if described is None:
        raise UsageError(f"nothing is called `{name}`", hint=_hint(name, texts, saved))
    return described


def _hint(name: str, texts: Texts, saved: AuditRecord | None) -> str:
    from qaudit.core.registry import short_forms, unknown

    if saved is None and " " in name:
        return "a note is explained with the audit that has it: `--audit FOLDER`"
    instead = "`qaudit list rules` has the codes, `qaudit list schemes` the schemes"
    hint = unknown("name", name, [*map(str.lower, texts), *short_forms()], ()).hint
    return instead if hint.startswith("there are:") else hint


def _note(words: str, texts: Texts, saved: AuditRecord | None) -> tuple[str, ...] | None:
    """Return the notes of an audit that have some words, what they are beside, and the rule."""
    if saved is None:
        return None
    places: dict[str, list[str]] = {}
    for row in saved.measurements:
        for note in row.notes:
            places.setdefault(note, []).append(f"{row.subject} at {row.scheme}")
    for note in saved.plan.notes:
        places.setdefault(note, []).append("the plan")
    matching = [note for note in places if words.casefold() in note.casefold()]
    if not matching:
        return None
    return (*(f"{note}: a note about {first_of(places[note])}." for note in matching), *texts[NOTE])


def _known(policies: Sequence[Policy]) -> Texts:
    from qaudit.types import CODES, METRICS

    texts: Texts = {
        code: (f"{code}: {entry.title}.", entry.help)
        for code, entry in CODES.items()
        if entry.title
    }
    for metric, record in METRICS.items():
        texts[metric] = (
            f"{metric} ({record.code}): {record.title}.",
            record.reason,
            f"What to do: {record.hint}." if record.hint else "",
        )
    for name, lines in _rules(policies):
        texts[name] = (*texts.get(name, ()), *lines)
    return {name: tuple(filter(None, lines)) for name, lines in texts.items()}


def _rules(policies: Sequence[Policy]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the rules of policies, with their margin in each."""
    from qaudit.types import METRICS, bound_of

    margins: dict[tuple[str, str], list[str]] = {}
    for policy in policies:
        for rule in policy.rules:
            bound = bound_of(rule.margin, METRICS[rule.metric].unit)
            of_policy = margins.setdefault((rule.name, rule.metric), [])
            of_policy.append(f"{bound} in `{policy.name}` ({rule.level})")
    for (name, metric), bounds in margins.items():
        record = METRICS[metric]
        yield (
            name,
            (
                f"{name} is a rule about `{metric}`, with a margin of {', '.join(bounds)}.",
                f"It fails where {record.title} ({record.code}). {record.reason}",
                f"What to do: {record.hint}." if record.hint else "",
            ),
        )


def _scheme(name: str) -> tuple[str, ...] | None:
    from qaudit.core.registry import parse_scheme
    from qaudit.errors import SchemeError

    try:
        scheme = parse_scheme(name)
    except SchemeError:
        return None
    return (f"{scheme.short} is `{scheme.spec}`.", (type(scheme).__doc__ or "").partition("\n")[0])
