"""Our results in a model-index: found by their source, cut out, and put in, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from yaml import MappingNode, Node, SequenceNode

from qaudit.hub.publishing.yaml_text import (
    dumped,
    end_of,
    indented,
    lines_of,
    next_line,
    said_by,
    value_of,
    with_lines,
    without,
)

SOURCE = "qaudit"
"""The name of the source of our results in a model-index."""


def is_ours(result: Any) -> bool:
    """Say whether a result of a model-index was put there by qaudit."""
    source = result.get("source") if isinstance(result, dict) else None
    if not isinstance(source, dict):
        return False
    return source.get("name") == SOURCE and str(source.get("url")).endswith("/qaudit/audit.json")


def with_results(front: str, model: str, results: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return a front matter with our results and no older ones, and a note where that cannot be."""
    said = said_by(front)
    index = said.get("model-index")
    ours = [r for e in _tables(index) for r in _tables(e.get("results")) if is_ours(r)]
    if ours == list(results):
        return front, ""
    if not index:
        if "model-index" in said:
            return front, "`model-index` is there and empty, and is left alone"
        made = dumped({"model-index": [{"name": model, "results": list(results)}]})
        return with_lines(front, made), ""
    models = list(_models(front, said["model-index"]))
    if not models or any(m.results.flow_style for m in models):
        return front, "`model-index` is not written one item in a line, and is left alone"
    if not results and all(m.is_ours for m in models) and len(models) == len(index):
        return without(front, "model-index"), ""
    return _replaced(front, models, results), ""


@dataclass(frozen=True)
class _Model:
    """One model of a model-index, as it is written and as it is read."""

    holder: SequenceNode
    element: Node
    results: SequenceNode
    rows: list[Any]

    @property
    def is_ours(self) -> bool:
        """Return whether no other tool has a result here."""
        return all(map(is_ours, self.rows))


def _models(front: str, index: list[Any]) -> Iterator[_Model]:
    """Yield every model of the index that has results."""
    found = value_of(front, "model-index")
    if found is None or not isinstance(found[1], SequenceNode) or found[1].flow_style:
        return
    for element, read in zip(found[1].value, index, strict=True):
        pairs = element.value if isinstance(element, MappingNode) else ()
        for key, value in pairs:
            if key.value == "results" and isinstance(value, SequenceNode) and value.value:
                yield _Model(found[1], element, value, read["results"])


def _replaced(front: str, models: Sequence[_Model], results: Sequence[dict[str, Any]]) -> str:
    """Cut our results out of every model, and put new ones where the first was, or at an end."""
    target = next((m for m in models if any(map(is_ours, m.rows))), models[0])
    cuts = [cut for m in models for cut in _cuts(front, m, whole=not results or m is not target)]
    at = cuts[0][0] if cuts else next_line(front, end_of(target.results))
    new = indented(dumped(list(results)), target.results.start_mark.column) if results else ""
    for start, stop in reversed(cuts):
        front = front[:start] + front[stop:]
    return front[:at] + new + front[at:]


def _cuts(front: str, model: _Model, *, whole: bool) -> list[tuple[int, int]]:
    """Return where our results are written: all of the model if it has no others, and `whole`."""
    if whole and model.is_ours:
        return [lines_of(front, model.holder, model.element)]
    return [
        lines_of(front, model.results, item)
        for item, row in zip(model.results.value, model.rows, strict=True)
        if is_ours(row)
    ]


def others_of(index: list[Any]) -> list[Any]:
    """Return a model-index without our results, and without the models that have no others."""
    kept = []
    for element in index:
        rows = element.get("results") if isinstance(element, dict) else None
        if not isinstance(rows, list):
            kept.append(element)
        elif others := [row for row in rows if not is_ours(row)]:
            kept.append({**element, "results": others})
    return kept


def _tables(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []
