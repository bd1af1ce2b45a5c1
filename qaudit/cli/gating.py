"""What `qaudit gate` does once its options are parsed: read, hold, render, write and print.

What the tool could not do is no finding: the error goes to stderr and into the exit code, and
into every format that knows the difference, so that a report of an earlier run is not taken for
the answer of this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from qaudit.cli.audits import believed
from qaudit.cli.speech import note, print_result
from qaudit.core.keys import nearest
from qaudit.errors import QauditError, UsageError, not_written
from qaudit.judge.gate import Held, gate
from qaudit.policy import policy_named
from qaudit.report.gate import (
    FORMATS,
    render,
    render_failure,
    step_summary,
    step_summary_of_failure,
)
from qaudit.types import Gate
from qaudit.whole import write_whole

TERMINAL, GITHUB = "terminal", "github"
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class Request:
    """The options of one `gate`."""

    audit: str
    policy: str
    baseline: str | None
    forms: tuple[str, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class Place:
    """A format, and the file it goes to; None is stdout."""

    form: str
    file: Path | None


def carry_out(request: Request) -> int:
    """Judge and print; return the exit code."""
    places = places_of(request.forms)
    try:
        found = _judged(request)
    except QauditError as error:
        failure = error  # `error` is gone when its block is left
        if any(place.form != TERMINAL or place.file for place in places):
            others = [place for place in places if place != Place(TERMINAL, None)]
            _put(
                others,
                lambda form: render_failure(failure, form),
                lambda: step_summary_of_failure(failure),
            )
        raise
    _put(places, lambda form: render(found, form), lambda: step_summary(found))
    if not request.quiet:
        for place in places:
            if place.file is not None:
                note(f"wrote {place.file}")
    return found.exit_code


def places_of(forms: Sequence[str]) -> tuple[Place, ...]:
    """Read `NAME` and `NAME=FILE`; whatever goes to files, one format goes to stdout."""
    places = []
    for text in forms:
        form, equals, file = text.partition("=")
        if form not in FORMATS:
            raise UsageError(f"there is no format `{form}`", hint=nearest(form, FORMATS))
        if equals and not Path(file).name:
            raise UsageError(f"`{text}` names no file", hint=f"write `{form}=FILE`")
        places.append(Place(form, Path(file) if file else None))
    shown = [place.form for place in places if place.file is None]
    if len(shown) > 1:
        raise UsageError(
            f"`{shown[0]}` and `{shown[1]}` would both be printed",
            hint=f"write one into a file: `--format {shown[1]}=FILE`",
        )
    return tuple(places) if shown else (Place(TERMINAL, None), *places)


def _judged(request: Request) -> Gate:
    policy = policy_named(request.policy)
    held, targets = _held(request.audit, request.quiet)
    baseline = _held(request.baseline, request.quiet)[0] if request.baseline else None
    return gate(policy, held, baseline, today=datetime.now(UTC).date(), targets=targets)


def _held(target: str, quiet: bool) -> tuple[Held, tuple[str, ...]]:
    """Read what is judged, or what it is judged against."""
    saved, table = believed(target, quiet=quiet)
    audit = saved.audit
    return Held.of(audit, table, target), audit.plan.recipe.targets


def _put(places: Sequence[Place], text: Callable[[str], str], summary: Callable[[], str]) -> None:
    """Render everything first, then write: what cannot be rendered leaves nothing half done."""
    ready = [(place, text(place.form)) for place in places]
    summaries = os.environ.get(STEP_SUMMARY)
    if summaries and any(place.form == GITHUB for place in places):
        _append(Path(summaries), summary())
    for place, content in ready:
        if place.file is not None:
            write_whole(place.file, content)
    for place, content in ready:
        if place.file is None:
            print_result(content)


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise not_written(path, error) from error
