"""An audit's results as the metadata of a model, as far as the Hub's formats allow.

A model-index belongs to one model, so only one subject of an audit has its results there: the one
that `--subject` names; or the checkpoint whose weights, by their hashes, are those of the
repository; or the soup that was picked, if the repository is none of its members'. A result must
name a data set of the Hub, so loss on other text has no entry. The metric is perplexity, which the
Hub knows, with its interval and the scheme in its name and the rest in its arguments.

`.eval_results/` is for registered benchmarks. Loss on text is none, and choices come from a file of
one's own: nothing is written there, and a note says so.

Of a README's front matter, only a key that changes is written again: what is inside it goes,
comments and quotes too. The client of the Hub writes all keys again, and makes `false` of `no`.
Afterwards the whole is read once more: it must hold what it held before, and what was to be added,
and nothing else. Our results are known by their source: the name `qaudit`, and the address of a
`qaudit/audit.json`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import yaml

from qaudit.errors import HubError, UsageError
from qaudit.report.format import percent, printable
from qaudit.report.views import View
from qaudit.support.foreign import yaml_and_nodes
from qaudit.support.keys import nearest
from qaudit.types import FULL_PRECISION, AuditRecord, MeasurementRow, Subject

SOURCE = "qaudit"
"""The name of the source of our results in a model-index."""

# What the Hub's own client takes for a front matter.
_FRONT = re.compile(r"\A(\s*---(?:\r\n|\n))((?:[\S\s]*?(?:\r\n|\n))??)(---[ \t]*(?:\r\n|\n|\Z))")
_OPENED = re.compile(r"\A\s*---\s*?(\r|\n|\Z)")


@dataclass(frozen=True)
class Metadata:
    """The metadata of an audit that belongs in a README's front matter."""

    tags: tuple[str, ...] = ()
    base_models: tuple[str, ...] = ()  # of a merge
    model: str = ""  # the name of the model, for a model-index that is not there yet
    results: tuple[dict[str, Any], ...] = ()


def with_metadata(readme: str, metadata: Metadata, where: str) -> tuple[str, tuple[str, ...]]:
    """Return a README with this metadata, and notes on what could not be added."""
    try:
        before, front, after = _split(readme)
        values, _ = _read(front)
    except ValueError as error:
        raise HubError(
            f"the front matter of `README.md` in `{where}` cannot be read: {printable(str(error))}",
            hint="fix it on the Hub, then run the same command again; nothing was written",
        ) from error
    edited, notes, expected = front, list[str](), dict(values)
    newline = "\r\n" if "\r\n" in (front or readme) else "\n"
    try:
        for change in (_tags, _base_models, _model_index):
            wanted, note = change(values, metadata)
            notes += [note] if note else []
            for key, value in wanted.items():
                edited = _with_key(edited, key, value, newline)
                expected[key] = value
                if value is None:
                    del expected[key]
        if repr(list(_read(edited)[0].items())) != repr(list(expected.items())):
            raise ValueError("more than was wanted has changed")
    except ValueError as error:
        raise HubError(
            f"the front matter of `README.md` in `{where}` is written in a way "
            "that nothing can be added to without changing the rest",
            hint="write its lists one item in a line, then run the same command again",
        ) from error
    if edited == front:
        return readme, tuple(notes)
    if not before:
        gap = "" if not readme or readme[0] in "\r\n" else newline
        before, after = f"---{newline}", f"---{newline}{gap}{after}"
    return before + edited + after, tuple(notes)


def front_matter(readme: str) -> dict[str, Any]:
    """Return the metadata that a README begins with; nothing of one that cannot be read."""
    try:
        return _read(_split(readme)[1])[0]
    except ValueError:
        return {}


def _split(readme: str) -> tuple[str, str, str]:
    """Return the text before the metadata, the metadata, and the rest."""
    match = _FRONT.match(readme)
    if match is not None:
        return match[1], match[2], readme[match.end(2) :]
    if _OPENED.match(readme):
        raise ValueError("it does not end")
    if readme.startswith("\ufeff"):
        raise ValueError("a byte order mark stands before it")
    return "", "", readme


Changes = tuple[dict[str, Any], str]
"""New values by their keys (None: the key goes), and a note where something is left out."""


def _tags(values: dict[str, Any], metadata: Metadata) -> Changes:
    tags = values.get("tags")
    if tags is not None and not isinstance(tags, list):
        return {}, f"`tags` is not a list, so `{metadata.tags[0]}` is not added to it"
    missing = [tag for tag in metadata.tags if tag not in (tags or ())]
    return ({"tags": [*(tags or ()), *missing]} if missing else {}), ""


def _base_models(values: dict[str, Any], metadata: Metadata) -> Changes:
    if not metadata.base_models:
        return {}, ""
    present = values.get("base_model")
    named = [present] if isinstance(present, str) else present
    names = set(map(str, named)) if isinstance(named, list) else set()
    if names and names != set(metadata.base_models):
        return {}, "`base_model` names other models than the soup's members, and is left alone"
    if not names and "base_model" in values:
        return {}, "`base_model` is there and empty, and is left alone"
    wanted: dict[str, Any] = {} if names else {"base_model": list(metadata.base_models)}
    if "base_model_relation" not in values:
        wanted["base_model_relation"] = "merge"
    return wanted, ""


def _model_index(values: dict[str, Any], metadata: Metadata) -> Changes:
    """Replace our results, behind those of others."""
    index, results = values.get("model-index"), list(metadata.results)
    elements = index if isinstance(index, list) else []
    models = [m for m in elements if isinstance(m, dict) and isinstance(m.get("results"), list)]
    models = [model for model in models if model["results"]]
    if [row for model in models for row in model["results"] if _is_ours(row)] == results:
        return {}, ""
    if "model-index" not in values:
        return {"model-index": [{"name": metadata.model, "results": results}]}, ""
    if not models:
        state = "has no list of results" if index else "is there and empty"
        return {}, f"`model-index` {state}, and is left alone"
    place = next((k for k, m in enumerate(models) if any(map(_is_ours, m["results"]))), 0)
    kept = [[row for row in model["results"] if not _is_ours(row)] for model in models]
    kept[place] += results
    pairs = zip(models, kept, strict=True)
    wanted = [{**model, "results": rows} for model, rows in pairs if rows]
    wanted += [element for element in elements if element not in models]
    return {"model-index": wanted or None}, ""


def _is_ours(result: Any) -> bool:
    source = result.get("source") if isinstance(result, dict) else None
    if not isinstance(source, dict):
        return False
    return source.get("name") == SOURCE and str(source.get("url")).endswith("/qaudit/audit.json")


def _read(front: str) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Return metadata, and where each of its keys begins; there may be none."""
    start = "---\n"  # the line above, for the numbers of lines
    values, root = yaml_and_nodes(start + front)
    if values is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ValueError("it is not a table of one key in a line")
    return values, [(key.value, key.start_mark.index - len(start)) for key, _ in root.value]


def _with_key(front: str, name: str, value: Any, newline: str) -> str:
    """Write a key anew in its place, or at the end; cut it out if its value is None."""
    text = ""
    if value is not None:
        form: Any = {"sort_keys": False, "allow_unicode": True, "width": math.inf}
        text = yaml.safe_dump({name: value}, line_break=newline, **form)
    begin = end = len(front)
    for key, place in reversed(_read(front)[1]):
        if key == name:
            begin = place
            break
        end = place
    else:
        return front + text
    below = re.search(r"(?m)(^[ \t]*(#.*)?\r?\n)*\Z", front[begin:end])  # which is the next key's
    return front[:begin] + text + (below[0] if below else "") + front[end:]


# ------------------------------------------------------------------------ of an audit


TAG = "qaudit"
NO_EVAL_RESULTS = (
    "nothing is written to `.eval_results/`: it is for registered benchmarks, "
    "and a loss on text is none"
)


def metadata_of(
    audit: AuditRecord,
    repo: str,
    label: str | None,
    *,
    weights: Collection[str] = (),
    audit_url: str = "",
) -> tuple[Metadata, tuple[str, ...]]:
    """Return the metadata for a repository that holds `weights`, by the identities of its files."""
    subject, notes = _subject_of(audit, repo, weights, label)
    wanted = Metadata((TAG,), model=repo.rpartition("/")[2])
    if subject is None:
        return wanted, (*notes, NO_EVAL_RESULTS)
    if subject.merge is not None:
        bases = tuple(base for base in _repos(subject) if base != repo)
        wanted = replace(wanted, base_models=bases)
    text = next((t for t in audit.plan.texts if t.source == audit.plan.recipe.evaluation), None)
    if text is None:
        note = (
            "nothing is written to `model-index`: a result names a data set of the Hub, "
            "and this was measured on other text"
        )
        return wanted, (*(notes if wanted.base_models else ()), note, NO_EVAL_RESULTS)
    view = View(audit)
    scores = [view.score(subject.label, scheme) for scheme in (FULL_PRECISION, *view.schemes)]
    metrics = [_metric(view, s) for s in scores if s is not None and math.isfinite(s.perplexity)]
    name = printable(f"{text.repo}: {text.path}")
    result = {
        "task": {"type": "text-generation"},
        "dataset": {"name": name, "type": text.repo, "revision": text.commit},
        "metrics": metrics,
        "source": {"url": audit_url, "name": SOURCE},
    }
    return replace(wanted, results=(result,) if metrics else ()), (*notes, NO_EVAL_RESULTS)


def _subject_of(
    audit: AuditRecord, repo: str, weights: Collection[str], label: str | None
) -> tuple[Subject | None, list[str]]:
    measured = {s.label: s for s in View(audit).subjects}
    if label is not None:
        if label not in measured:
            raise UsageError(f"nothing was measured of `{label}`", hint=nearest(label, measured))
        return measured[label], []
    picked = audit.pick.subject if audit.pick else None
    same = [s for s in measured.values() if s.merge is None and s.first.files]
    same = [s for s in same if all(f.sha256 in weights for f in s.first.files)]
    if same:
        return next((s for s in same if s.label == picked), same[-1]), []
    pick = measured.get(picked or "")
    if pick is not None and pick.merge is not None and repo not in _repos(pick):
        note = f"`{repo}` is taken for `{pick.label}`, the pick"
        return pick, [f"{note}; name another with `--subject`"]
    return None, [
        f"nothing is written to `model-index`: the weights in `{repo}` are none of "
        "those audited; say which they are with `--subject`"
    ]


def _repos(subject: Subject) -> list[str]:
    return list(dict.fromkeys(c.ref.location for c, _ in subject.members if c.commit))


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
