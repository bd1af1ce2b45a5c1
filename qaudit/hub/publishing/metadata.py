"""An audit's results as the metadata of a model, as far as the Hub's formats allow.

A model-index belongs to one model, so only one subject of an audit has its results there: the one
that `--subject` names; or the checkpoint whose weights, by their hashes, are those of the
repository; or the soup that was picked, if the repository is none of its members'. A result must
name a data set of the Hub, so loss on other text has no entry. The metric is perplexity, which the
Hub knows, with its interval and the scheme in its name and the rest in its arguments.

`.eval_results/` is for registered benchmarks. Loss on text is none, and choices come from a file of
one's own: nothing is written there, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from qaudit.core.keys import nearest
from qaudit.errors import UsageError
from qaudit.hub.publishing.front_matter import SOURCE, Metadata
from qaudit.report.format import percent, printable
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, AuditRecord, Interval, MeasurementRow, Subject, TextFile

TAG = "qaudit"
NO_EVAL_RESULTS = (
    "nothing is written to `.eval_results/`: it is for registered benchmarks, "
    "and a loss on text is none"
)


@dataclass(frozen=True)
class Repository:
    """The repository that is written to: its name, what it holds, and where its audit will be."""

    name: str
    weights: Collection[str] = ()  # identities of its files
    audit_url: str = ""


def metadata_of(
    audit: AuditRecord, repository: Repository, label: str | None
) -> tuple[Metadata, tuple[str, ...]]:
    subject, notes = _subject_of(audit, repository, label)
    bases, model = _bases(subject, repository), repository.name.rpartition("/")[2]
    if subject is None:
        return Metadata((TAG,), model=model), (*notes, NO_EVAL_RESULTS)
    text = next((t for t in audit.plan.texts if t.source == audit.plan.recipe.evaluation), None)
    if text is None:
        note = (
            "nothing is written to `model-index`: a result names a data set of the Hub, "
            "and this was measured on other text"
        )
        notes = [*(notes if bases else ()), note]
        return Metadata((TAG,), bases, model), (*notes, NO_EVAL_RESULTS)
    result = _result(View(audit), subject, text, repository.audit_url)
    return Metadata((TAG,), bases, model, result), (*notes, NO_EVAL_RESULTS)


def _subject_of(
    audit: AuditRecord, repository: Repository, label: str | None
) -> tuple[Subject | None, list[str]]:
    measured = View(audit).subjects
    if label is not None:
        subject = next((s for s in measured if s.label == label), None)
        if subject is None:
            raise UsageError(
                f"nothing was measured of `{label}`",
                hint=nearest(label, [s.label for s in measured]),
            )
        return subject, []
    picked = audit.pick.subject if audit.pick else None
    same = [s for s in measured if s.merge is None and _is_there(s, repository)]
    if same:
        return next((s for s in same if s.label == picked), same[-1]), []
    pick = next((s for s in measured if s.label == picked), None)
    if pick is not None and pick.merge is not None and repository.name not in _repos(pick):
        note = f"`{repository.name}` is taken for `{pick.label}`, the pick"
        return pick, [f"{note}; name another with `--subject`"]
    return None, [
        f"nothing is written to `model-index`: the weights in `{repository.name}` are none of "
        "those audited; say which they are with `--subject`"
    ]


def _is_there(subject: Subject, repository: Repository) -> bool:
    files = subject.first.files
    return bool(files) and all(file.sha256 in repository.weights for file in files)


def _repos(subject: Subject) -> list[str]:
    return list(dict.fromkeys(c.ref.location for c, _ in subject.members if c.commit))


def _bases(subject: Subject | None, repository: Repository) -> tuple[str, ...]:
    if subject is None or subject.merge is None:
        return ()
    return tuple(repo for repo in _repos(subject) if repo != repository.name)


def _result(view: View, subject: Subject, text: TextFile, url: str) -> tuple[dict[str, Any], ...]:
    scores = [view.score(subject.label, scheme) for scheme in (FULL_PRECISION, *view.schemes)]
    metrics = [_metric(view, s) for s in scores if s is not None and math.isfinite(s.perplexity)]
    if not metrics:
        return ()
    entry = {
        "task": {"type": "text-generation"},
        "dataset": {
            "name": printable(f"{text.repo}: {text.path}"),
            "type": text.repo,
            "revision": text.commit,
        },
        "metrics": metrics,
        "source": {"url": url, "name": SOURCE},
    }
    return (entry,)


def _metric(view: View, score: MeasurementRow) -> dict[str, Any]:
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    low, high = (_exp(score.ce.low), _exp(score.ce.high))
    name = f"perplexity in full precision, {level} interval [{low:.4g}, {high:.4g}]"
    if score.scheme != FULL_PRECISION:
        name = f"perplexity at {score.scheme}, {level} interval [{low:.4g}, {high:.4g}]"
    if score.relative_error is not None:
        name += f"; quantization adds {percent(score.relative_error)} % to the loss"
    arguments = {
        "scheme": score.scheme,
        "spec": score.spec,
        **_values("ce", score.ce),
        **(_values("relative_error", score.relative_error) if score.relative_error else {}),
        "documents": score.documents,
        "tokens": score.tokens,
    }
    return {
        "type": "perplexity",
        "value": score.perplexity,
        "name": printable(name),
        "args": arguments,
    }


def _values(name: str, interval: Interval) -> dict[str, float]:
    values = {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
