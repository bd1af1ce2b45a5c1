"""`qaudit import`: answers that lm-eval or inspect generated, as tasks of an audit. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AsJson, Quiet, option, with_settings
from qaudit.cli.terminal import print_result, say
from qaudit.errors import UsageError

if TYPE_CHECKING:
    from qaudit.types import TaskRow

_ANSWERS = "The answers"


@with_settings(keys=("sign",))
def import_(
    audit: Annotated[
        Path, typer.Argument(metavar="AUDIT", help="The output folder of a finished scan.")
    ],
    base: Annotated[
        list[Path],
        option(_ANSWERS, "Of full precision: a file or the folder of a run. Repeatable.", "--base"),
    ],
    quantized: Annotated[
        list[str],
        option(
            _ANSWERS,
            "Of a scheme of the audit: a file or the folder of a run. Repeatable.",
            "--quantized",
            metavar="SCHEME=PATH",
        ),
    ],
    subject: Annotated[
        str | None,
        option(_ANSWERS, "The checkpoint or soup that gave them.", show_default="the only one"),
    ] = None,
    metric: Annotated[
        str | None,
        option(
            _ANSWERS,
            "Whose marks count, as `exact_match,strict-match` or a scorer.",
            show_default="acc, or the only one",
        ),
    ] = None,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Add tasks that lm-eval or inspect ran to an audit: paired, with intervals, for its gate.

    Reads `samples_*.jsonl` of lm-eval, and logs of inspect (`.json`, `.eval`).
    Items are paired by a hash of the item and its prompt. Nothing is generated or measured.

    Example: qaudit import out --base lm-eval/bf16 --quantized gptq-4bit=lm-eval/w4
    """
    from qaudit.audit import import_answers
    from qaudit.saved.codec import encode

    files = _by_scheme(quantized)
    sign = bool(settings["sign"])
    judged = import_answers(audit, base, files, subject=subject, metric=metric, sign=sign)
    rows = [row for row in judged.record.tasks if row.imported]
    print_result(json.dumps([*map(encode, rows)], indent=1) if as_json else _text(rows))
    if not quiet:
        say(f"wrote {audit / 'card.md'}, report.html, audit.json, evidence/ and plots/")
    return 0


def _by_scheme(texts: Sequence[str]) -> dict[str, list[str | Path]]:
    places: dict[str, list[str | Path]] = {}
    for text in texts:
        scheme, place = _split(text)
        if not (scheme and place):
            raise UsageError(
                f"`--quantized {text}` is not SCHEME=PATH",
                hint="write it as `--quantized SCHEME=FILE`, with a scheme of the audit",
            )
        places.setdefault(scheme, []).append(Path(place))
    return places


def _split(text: str) -> tuple[str, str]:
    """Split `SCHEME=PATH`: a scheme may have parameters, as `gptq-3bit:group=64`."""
    parts = text.split("=")
    splits = [("=".join(parts[:k]), "=".join(parts[k:])) for k in range(1, len(parts))]
    there = (split for split in splits if Path(split[1]).exists())
    return next(there, splits[-1] if splits else ("", ""))


def _text(rows: Sequence[TaskRow]) -> str:
    from qaudit.report.format import or_dash, percent

    lines = []
    for row in rows:
        line = f"{row.subject} {row.scheme} {row.task}: {percent(row.accuracy)} % of {row.items}"
        if row.drop is not None:
            line += (
                f"; {percent(row.drop)} points lost, {row.right_to_wrong} right to wrong, "
                f"{row.wrong_to_right} back, p {or_dash(row.p_value, '{:.2g}'.format)}"
            )
        lines.append(line)
    return "\n".join(lines)
