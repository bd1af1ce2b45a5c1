"""Read YAML with the line of every key, so that a breach can point to its rule.

Values and nodes come from `core.foreign`. Stricter here: anchors and aliases are refused, since a
file of this size needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from qaudit.core.foreign import Place, lines_of, nearest_line, yaml_and_nodes
from qaudit.errors import PolicyError

DEEPEST = 8
"""Tables and lists inside each other; a policy has four."""


@dataclass(frozen=True)
class Read:
    """A table, and the line of every key and item in it."""

    table: dict[str, Any]
    lines: dict[Place, int]

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the nearest one around it."""
        return nearest_line(self.lines, place)


def read(text: str, where: str) -> Read:
    """Read one YAML document that is a table."""
    try:
        table, node = yaml_and_nodes(text)
    except ValueError as error:
        reason = str(error)
        wrong = f", {reason}" if reason.startswith("line ") else f" is not YAML: {reason}"
        raise PolicyError(f"{where}{wrong}", hint="fix it there") from error
    if not isinstance(table, dict) or not isinstance(node, yaml.MappingNode):
        raise PolicyError(
            f"{where} is not a policy", hint="a policy is a table of keys, `rules` among them"
        )
    _refuse_knots(text, where)
    return Read(table, lines_of(node))


def _refuse_knots(text: str, where: str) -> None:
    """Refuse anchors, aliases, and nesting that no policy has."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise PolicyError(
                f"{where}, line {line}: there is an anchor or an alias", hint="write it out"
            )
        if depth > DEEPEST:
            raise PolicyError(
                f"{where}, line {line}: it nests deeper than a policy does", hint="fix it there"
            )
