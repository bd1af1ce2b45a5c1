"""`qaudit explain`: what a finding, a rule or a metric says, how it is measured, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from qaudit.cli.terminal import print_result
from qaudit.errors import UsageError
from qaudit.support.keys import nearest


def explain(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="A finding's code, a rule of a policy, a metric, or a scheme."
        ),
    ],
) -> int:
    """Say what a code, a rule, a metric or a scheme means, how it is measured, and what to do.

    Example: qaudit explain four-bit-tail QA029
    """
    from qaudit.report.terminal import filled

    texts = ["\n\n".join(map(filled, _explained(name))) for name in names]
    print_result("\n\n".join(texts) + "\n")
    return 0


def _explained(name: str) -> tuple[str, ...]:
    texts = _known()
    key = name if name in texts else name.upper()
    if key in texts:
        return texts[key]
    described = _scheme(name)
    if described is None:
        raise UsageError(f"nothing is called `{name}`", hint=nearest(name, tuple(texts)))
    return described


def _known() -> dict[str, tuple[str, ...]]:
    from qaudit.types import CODES, METRICS

    texts: dict[str, tuple[str, ...]] = {
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
    for name, lines in _rules():
        texts[name] = (*texts.get(name, ()), *lines)
    return {name: tuple(filter(None, lines)) for name, lines in texts.items()}


def _rules() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the rules of the policies that ship, with their margin in each."""
    from qaudit.judge.gate.sentences import bound_of
    from qaudit.policy import PRESETS, preset
    from qaudit.types import METRICS

    margins: dict[str, list[str]] = {}
    metrics: dict[str, str] = {}
    for policy in PRESETS:
        for rule in preset(policy).rules:
            bound = bound_of(rule.margin, METRICS[rule.metric].unit)
            margins.setdefault(rule.name, []).append(f"{bound} in `{policy}` ({rule.level})")
            metrics[rule.name] = rule.metric
    for name, bounds in margins.items():
        record = METRICS[metrics[name]]
        yield (
            name,
            (
                f"{name} is a rule about `{metrics[name]}`, with a margin of {', '.join(bounds)}.",
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
