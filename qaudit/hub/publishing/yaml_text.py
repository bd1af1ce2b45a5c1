"""YAML edited as text: the parser gives where a value is, and only that place is touched.

Places are offsets into the text; a list may have any of YAML's forms. Whether an edit did what it
should is for the caller to check: aliases, for one, are written somewhere else.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml import MappingNode, Node, SequenceNode

from qaudit.core.foreign import yaml_of


class OddError(ValueError):
    """This is not YAML as the front matter of a README has it."""


def root_of(front: str) -> MappingNode | None:
    """Parse metadata; nothing at all is fine, and anything but a table is not."""
    try:
        root = yaml.compose(front, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 2}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        shown = "".join(c if c.isprintable() else "?" for c in problem)
        raise OddError(f"{shown}{line}") from error
    if root is None:
        return None
    if not isinstance(root, MappingNode) or root.flow_style:
        raise OddError("it is not a table of one key in a line")
    names = [key.value for key, _ in root.value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OddError(f"it names `{twice[0]}` twice")
    try:
        yaml_of(front)  # refuses aliases that stand for millions of items
    except ValueError as error:
        raise OddError("".join(c if c.isprintable() else "?" for c in str(error))) from error
    return root


def loaded(front: str) -> dict[str, Any]:
    return yaml.safe_load(front) or {}


def with_item(front: str, name: str, item: str) -> str:
    """Add an item to a list of words, whatever form it has, or begin it."""
    pair = value_of(front, name)
    if pair is None:
        return with_lines(front, f"{name}:\n- {item}\n")
    key, value = pair
    if isinstance(value, SequenceNode) and value.flow_style:
        at = end_of(value.value[-1]) if value.value else value.end_mark.index - 1
        return front[:at] + (f", {item}" if value.value else item) + front[at:]
    if isinstance(value, SequenceNode):
        at, dash = next_line(front, end_of(value)), " " * value.start_mark.column
        return front[:at] + f"{dash}- {item}\n" + front[at:]
    if value.start_mark.index < value.end_mark.index:  # `null`, or `~`
        return front[: value.start_mark.index] + f"[{item}]" + front[value.end_mark.index :]
    at, dash = next_line(front, key.end_mark.index), " " * key.start_mark.column
    return front[:at] + f"{dash}- {item}\n" + front[at:]


def without(front: str, name: str) -> str:
    """Cut out a key and all it holds."""
    pair = value_of(front, name)
    if pair is None:
        return front
    key, value = pair
    return front[: key.start_mark.index] + front[next_line(front, end_of(value)) :]


def value_of(front: str, name: str) -> tuple[Node, Node] | None:
    root = root_of(front)
    pairs = root.value if root is not None else ()
    return next(((key, value) for key, value in pairs if key.value == name), None)


def with_lines(front: str, lines: str) -> str:
    """Add lines at the end, as far to the right as the other keys."""
    root = root_of(front)
    return front + indented(lines, root.start_mark.column if root is not None else 0)


def indented(lines: str, column: int) -> str:
    return re.sub(r"(?m)^(?=.)", " " * column, lines)


def lines_of(front: str, holder: SequenceNode, item: Node) -> tuple[int, int]:
    """Return the start and the end of an item of a list: whole lines, its dash included."""
    start = front.rfind("\n", 0, item.start_mark.index) + 1
    column = holder.start_mark.column
    while front[start : start + column + 1].strip() != "-":
        if start == 0:
            raise OddError("an item of a list has no dash")
        start = front.rfind("\n", 0, start - 1) + 1
    return start, next_line(front, end_of(item))


def end_of(node: Node) -> int:
    """Return the end of the last value in a node, before blank lines and comments."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return max(map(end_of, last)) if isinstance(last, tuple) else end_of(last)


def next_line(front: str, at: int) -> int:
    """Return the start of the line after a place; a place that begins a line stays."""
    if at > 0 and front[at - 1] == "\n":
        return at
    end = front.find("\n", at)
    return len(front) if end < 0 else end + 1


def dumped(value: object) -> str:
    """Return a value of ours as YAML, a key or an item in a line."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=float("inf")))
