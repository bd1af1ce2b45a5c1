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
from dataclasses import dataclass, replace
from typing import Any

from qaudit.core.keys import nearest
from qaudit.errors import UsageError
from qaudit.hub.publishing.front_matter import SOURCE, Metadata
from qaudit.report.format import percent, printable
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, AuditRecord, MeasurementRow, Subject, TextFile

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
    wanted = Metadata((TAG,), model=repository.name.rpartition("/")[2])
    if subject is None:
        return wanted, (*notes, NO_EVAL_RESULTS)
    if subject.merge is not None:
        bases = tuple(repo for repo in _repos(subject) if repo != repository.name)
        wanted = replace(wanted, base_models=bases)
    text = next((t for t in audit.plan.texts if t.source == audit.plan.recipe.evaluation), None)
    if text is not None:
        results = _results(View(audit), subject, text, repository.audit_url)
        return replace(wanted, results=results), (*notes, NO_EVAL_RESULTS)
    note = (
        "nothing is written to `model-index`: a result names a data set of the Hub, "
        "and this was measured on other text"
    )
    return wanted, (*(notes if wanted.base_models else ()), note, NO_EVAL_RESULTS)


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


def _results(view: View, subject: Subject, text: TextFile, url: str) -> tuple[dict[str, Any], ...]:
    scores = [view.score(subject.label, scheme) for scheme in (FULL_PRECISION, *view.schemes)]
    metrics = [_metric(view, s) for s in scores if s is not None and math.isfinite(s.perplexity)]
    name = printable(f"{text.repo}: {text.path}")
    entry = {
        "task": {"type": "text-generation"},
        "dataset": {"name": name, "type": text.repo, "revision": text.commit},
        "metrics": metrics,
        "source": {"url": url, "name": SOURCE},
    }
    return (entry,) if metrics else ()


def _metric(view: View, score: MeasurementRow) -> dict[str, Any]:
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    low, high = (math.exp(x) if x < 700 else math.inf for x in (score.ce.low, score.ce.high))
    what = "in full precision" if score.scheme == FULL_PRECISION else f"at {score.scheme}"
    name = f"perplexity {what}, {level} interval [{low:.4g}, {high:.4g}]"
    if score.relative_error is not None:
        name += f"; quantization adds {percent(score.relative_error)} % to the loss"
    arguments: dict[str, Any] = {"scheme": score.scheme, "spec": score.spec}
    for key, interval in (("ce", score.ce), ("relative_error", score.relative_error)):
        for end, value in () if interval is None else vars(interval).items():
            if math.isfinite(value):
                arguments[key if end == "estimate" else f"{key}_{end}"] = value
    arguments |= {"documents": score.documents, "tokens": score.tokens}
    value, name = score.perplexity, printable(name)
    return {"type": "perplexity", "value": value, "name": name, "args": arguments}
