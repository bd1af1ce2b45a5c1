"""The metadata that a README begins with, edited in place: what is not ours keeps its bytes.

    ---
    license: apache-2.0      # comments, order and quotes stay
    tags: [text, qaudit]     <- added to whatever form the list has
    model-index: ...         <- our results replaced, others' kept
    ---

YAML that is read and written again loses comments, quotes and line breaks, so nothing is. The
parser says where each value begins and ends, and text is put in or cut out there. Our results
are known by their source: the name `qaudit`, and the address of a `qaudit/audit.json`.

Afterwards the whole is read once more: it must say what it said before, and what was to be
added, and nothing else. What cannot be edited so (a list in braces, an alias) is left alone and
told; a front matter that cannot be read is refused, because the Hub could not read it either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qaudit.errors import HubError
from qaudit.hub.publishing.model_index import others_of, with_results
from qaudit.hub.publishing.yaml_text import (
    OddError,
    dumped,
    root_of,
    said_by,
    with_item,
    with_lines,
)

# What the Hub's own client takes for a front matter.
_FRONT = re.compile(r"\A(\s*---(?:\r\n|\n))((?:[\S\s]*?(?:\r\n|\n))??)(---[ \t]*(?:\r\n|\n|\Z))")
_OPENED = re.compile(r"\A\s*---\s*?(\r|\n|\Z)")


@dataclass(frozen=True)
class Metadata:
    """What a README's front matter is to say of an audit."""

    tags: tuple[str, ...] = ()
    base_models: tuple[str, ...] = ()  # of a merge
    model: str = ""  # the name of the model, for a model-index that is not there yet
    results: tuple[dict[str, Any], ...] = ()


def with_metadata(readme: str, wanted: Metadata, where: str) -> tuple[str, tuple[str, ...]]:
    """Return a README that says what is wanted, and notes on what it could not be made to say."""
    try:
        before, front, after = _split(readme)
        root_of(front)
    except OddError as error:
        raise HubError(
            f"the front matter of `README.md` in `{where}` cannot be read: {error}",
            hint="fix it on the Hub, then run the same command again; nothing was written",
        ) from error
    try:
        edited, notes = _edited(front, wanted)
    except OddError as error:
        raise HubError(
            f"the front matter of `README.md` in `{where}` is written in a way "
            "that nothing can be added to without changing the rest",
            hint="write its lists one item in a line, then run the same command again",
        ) from error
    newline = _newline(front or readme)
    if edited == front:
        return readme, notes
    edited = edited.replace("\r\n", "\n").replace("\n", newline) if newline != "\n" else edited
    if not before:
        gap = "" if not readme or readme[0] in "\r\n" else newline
        before, after = f"---{newline}", f"---{newline}{gap}{after}"
    return before + edited + after, notes


def _newline(text: str) -> str:
    """Return how lines end: where they end in two ways, as most files have it."""
    return "\r\n" if "\r\n" in text and not re.search(r"(?<!\r)\n", text) else "\n"


def _edited(front: str, wanted: Metadata) -> tuple[str, tuple[str, ...]]:
    """Make every edit, and see that nothing else was changed by it."""
    edited, notes = front, []
    for edit in (_with_tags, _with_base_models, _with_results):
        edited, said = edit(edited, wanted)
        root_of(edited)
        notes += [said] if said else []
    if repr(_others(said_by(front), wanted)) != repr(_others(said_by(edited), wanted)):
        raise OddError("more than was wanted has changed")
    return edited, tuple(notes)


def _split(readme: str) -> tuple[str, str, str]:
    """Return what stands before the metadata, the metadata, and the rest."""
    found = _FRONT.match(readme)
    if found is not None:
        return found[1], found[2], readme[found.end(2) :]
    if _OPENED.match(readme):
        raise OddError("it does not end")
    if readme.startswith("\ufeff"):
        raise OddError("a byte order mark stands before it")
    return "", "", readme


def _others(said: dict[str, Any], wanted: Metadata) -> list[tuple[str, Any]]:
    """Return what a front matter says that is not ours, in its order."""
    kept: list[tuple[str, Any]] = []
    for name, value in said.items():
        if name == "tags" and isinstance(value, list | None):
            value = [tag for tag in value or () if tag not in wanted.tags]
        elif name == "model-index" and isinstance(value, list | None):
            value = others_of(value or [])
        elif name in ("base_model", "base_model_relation") and wanted.base_models:
            continue
        if value not in ([], None):
            kept.append((name, value))
    return kept


# ------------------------------------------------------------------------------------------ tags


def _with_tags(front: str, wanted: Metadata) -> tuple[str, str]:
    has = said_by(front).get("tags")
    missing = [tag for tag in wanted.tags if tag not in (has if isinstance(has, list) else ())]
    if not missing:
        return front, ""
    if has is not None and not isinstance(has, list):
        return front, f"`tags` is not a list, so `{missing[0]}` is not added to it"
    for tag in missing:
        front = with_item(front, "tags", tag)
    return front, ""


# ----------------------------------------------------------------------------------- base models


def _with_base_models(front: str, wanted: Metadata) -> tuple[str, str]:
    said = said_by(front)
    if not wanted.base_models:
        return front, ""
    has = said.get("base_model")
    named = (
        {has} if isinstance(has, str) else set(map(str, has)) if isinstance(has, list) else set()
    )
    if named and named != set(wanted.base_models):
        return front, "`base_model` names other models than the soup's members, and is left alone"
    if not named and "base_model" in said:
        return front, "`base_model` is there and empty, and is left alone"
    if not named:
        lines = "".join(dumped([base]) for base in wanted.base_models)
        front = with_lines(front, f"base_model:\n{lines}")
    if "base_model_relation" not in said:
        front = with_lines(front, "base_model_relation: merge\n")
    return front, ""


def _with_results(front: str, wanted: Metadata) -> tuple[str, str]:
    return with_results(front, wanted.model, wanted.results)
