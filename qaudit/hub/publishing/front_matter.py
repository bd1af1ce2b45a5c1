"""The metadata that a README begins with, edited in place: what is not ours keeps its bytes.

    ---
    license: apache-2.0      # comments, order and quotes stay
    tags: [text, qaudit]     <- added to whatever form the list has
    model-index: ...         <- our results replaced, others' kept
    ---

YAML that is read and written again loses comments, quotes and line breaks, so nothing is. The
parser gives where each value begins and ends, and text is put in or cut out there. Our results
are known by their source: the name `qaudit`, and the address of a `qaudit/audit.json`.

Afterwards the whole is read once more: it must hold what it held before, and what was to be
added, and nothing else. What cannot be edited so (a list in braces, an alias) is left alone, with
a note; a front matter that cannot be read is refused, because the Hub could not read it either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from yaml import MappingNode, Node, SequenceNode

from qaudit.errors import HubError
from qaudit.hub.publishing.yaml_text import (
    OddError,
    dumped,
    end_of,
    indented,
    lines_of,
    loaded,
    next_line,
    root_of,
    value_of,
    with_item,
    with_lines,
    without,
)

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
        root_of(front)
    except OddError as error:
        raise HubError(
            f"the front matter of `README.md` in `{where}` cannot be read: {error}",
            hint="fix it on the Hub, then run the same command again; nothing was written",
        ) from error
    try:
        edited, notes = _edited(front, metadata)
    except OddError as error:
        raise HubError(
            f"the front matter of `README.md` in `{where}` is written in a way "
            "that nothing can be added to without changing the rest",
            hint="write its lists one item in a line, then run the same command again",
        ) from error
    if edited == front:
        return readme, notes
    newline = _newline(front or readme)
    edited = edited.replace("\r\n", "\n").replace("\n", newline) if newline != "\n" else edited
    if not before:
        gap = "" if not readme or readme[0] in "\r\n" else newline
        before, after = f"---{newline}", f"---{newline}{gap}{after}"
    return before + edited + after, notes


def _newline(text: str) -> str:
    """Return how lines end; where they end in two ways, as most files have it."""
    return "\r\n" if "\r\n" in text and not re.search(r"(?<!\r)\n", text) else "\n"


def _edited(front: str, metadata: Metadata) -> tuple[str, tuple[str, ...]]:
    """Make every edit, and check that nothing else was changed by it."""
    edited, notes = front, []
    for edit in (_with_tags, _with_base_models, _with_results):
        edited, note = edit(edited, metadata)
        root_of(edited)
        notes += [note] if note else []
    if repr(_others(loaded(front), metadata)) != repr(_others(loaded(edited), metadata)):
        raise OddError("more than was wanted has changed")
    return edited, tuple(notes)


def _split(readme: str) -> tuple[str, str, str]:
    """Return what is before the metadata, the metadata, and the rest."""
    match = _FRONT.match(readme)
    if match is not None:
        return match[1], match[2], readme[match.end(2) :]
    if _OPENED.match(readme):
        raise OddError("it does not end")
    if readme.startswith("\ufeff"):
        raise OddError("a byte order mark stands before it")
    return "", "", readme


def _others(values: dict[str, Any], metadata: Metadata) -> list[tuple[str, Any]]:
    """Return the values of a front matter that are not ours, in their order."""
    others: list[tuple[str, Any]] = []
    for name, value in values.items():
        if name == "tags" and isinstance(value, list | None):
            value = [tag for tag in value or () if tag not in metadata.tags]
        elif name == "model-index" and isinstance(value, list | None):
            value = _index_of_others(value or [])
        elif name in ("base_model", "base_model_relation") and metadata.base_models:
            continue
        if value not in ([], None):
            others.append((name, value))
    return others


def _index_of_others(index: list[Any]) -> list[Any]:
    """Return a model-index without our results, and without the models that have no others."""
    others = []
    for element in index:
        rows = element.get("results") if isinstance(element, dict) else None
        if not isinstance(rows, list):
            others.append(element)
        elif foreign := [row for row in rows if not _is_ours(row)]:
            others.append({**element, "results": foreign})
    return others


# -------------------------------------------------------------------------- tags and base models


def _with_tags(front: str, metadata: Metadata) -> tuple[str, str]:
    tags = loaded(front).get("tags")
    missing = [tag for tag in metadata.tags if tag not in (tags if isinstance(tags, list) else ())]
    if not missing:
        return front, ""
    if tags is not None and not isinstance(tags, list):
        return front, f"`tags` is not a list, so `{missing[0]}` is not added to it"
    for tag in missing:
        front = with_item(front, "tags", tag)
    return front, ""


def _with_base_models(front: str, metadata: Metadata) -> tuple[str, str]:
    if not metadata.base_models:
        return front, ""
    values = loaded(front)
    present = values.get("base_model")
    names: set[str] = set()
    if isinstance(present, str | list):
        names = {present} if isinstance(present, str) else set(map(str, present))
    if names and names != set(metadata.base_models):
        return front, "`base_model` names other models than the soup's members, and is left alone"
    if not names and "base_model" in values:
        return front, "`base_model` is there and empty, and is left alone"
    if not names:
        lines = "".join(dumped([base]) for base in metadata.base_models)
        front = with_lines(front, f"base_model:\n{lines}")
    if "base_model_relation" not in values:
        front = with_lines(front, "base_model_relation: merge\n")
    return front, ""


# ----------------------------------------------------------------------------------- model-index


def _is_ours(result: Any) -> bool:
    source = result.get("source") if isinstance(result, dict) else None
    if not isinstance(source, dict):
        return False
    return source.get("name") == SOURCE and str(source.get("url")).endswith("/qaudit/audit.json")


def _with_results(front: str, metadata: Metadata) -> tuple[str, str]:
    """Return a front matter with our results and no older ones, and a note where that cannot be."""
    values, results = loaded(front), list(metadata.results)
    index = values.get("model-index")
    ours = [r for e in _tables(index) for r in _tables(e.get("results")) if _is_ours(r)]
    if ours == results:
        return front, ""
    if not index:
        if "model-index" in values:
            return front, "`model-index` is there and empty, and is left alone"
        new = dumped({"model-index": [{"name": metadata.model, "results": results}]})
        return with_lines(front, new), ""
    models = list(_models(front, index))
    if not models or any(m.results.flow_style for m in models):
        return front, "`model-index` is not written one item in a line, and is left alone"
    if not results and all(m.is_ours for m in models) and len(models) == len(index):
        return without(front, "model-index"), ""
    return _replaced(front, models, results), ""


@dataclass(frozen=True)
class _Model:
    """One model of a model-index: its nodes in the text, and its values."""

    holder: SequenceNode
    element: Node
    results: SequenceNode
    rows: list[Any]

    @property
    def is_ours(self) -> bool:
        return all(map(_is_ours, self.rows))


def _models(front: str, index: list[Any]) -> Iterator[_Model]:
    pair = value_of(front, "model-index")
    if pair is None or not isinstance(pair[1], SequenceNode) or pair[1].flow_style:
        return
    for element, table in zip(pair[1].value, index, strict=True):
        for key, value in element.value if isinstance(element, MappingNode) else ():
            if key.value == "results" and isinstance(value, SequenceNode) and value.value:
                yield _Model(pair[1], element, value, table["results"])


def _replaced(front: str, models: Sequence[_Model], results: list[dict[str, Any]]) -> str:
    """Cut our results out of every model, and put new ones where the first was, or at an end."""
    target = next((m for m in models if any(map(_is_ours, m.rows))), models[0])
    cuts = [cut for m in models for cut in _cuts(front, m, whole=not results or m is not target)]
    at = cuts[0][0] if cuts else next_line(front, end_of(target.results))
    new = indented(dumped(results), target.results.start_mark.column) if results else ""
    for start, stop in reversed(cuts):
        front = front[:start] + front[stop:]
    return front[:at] + new + front[at:]


def _cuts(front: str, model: _Model, *, whole: bool) -> list[tuple[int, int]]:
    """Return where our results are: all of the model if it has no others, and `whole`."""
    if whole and model.is_ours:
        return [lines_of(front, model.holder, model.element)]
    return [
        lines_of(front, model.results, item)
        for item, row in zip(model.results.value, model.rows, strict=True)
        if _is_ours(row)
    ]


def _tables(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []
