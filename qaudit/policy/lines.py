"""YAML with the line of everything, so that a breach can point to the rule that it breaches.

Values come from PyYAML's safe loader, lines from the nodes that it builds them of. Stricter than
YAML in two ways: a key that stands twice is refused, because the first would be lost without a
word, and so are anchors and aliases, which a file of this size needs for nothing but trouble.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from qaudit.errors import PolicyError

Place = tuple[str | int, ...]
"""The keys and positions that lead to a value: `("rules", 0, "margin")`."""

DEEPEST = 8
"""Tables and lists inside each other; a policy has four."""


@dataclass(frozen=True)
class Read:
    """A table, and the line of every key and item in it."""

    table: dict[str, Any]
    lines: dict[Place, int]

    def line(self, place: Place) -> int:
        """Return the line of a place, or of the nearest one around it."""
        while place not in self.lines and place:
            place = place[:-1]
        return self.lines.get(place, 1)


def read(text: str, where: str) -> Read:
    """Read one YAML document that is a table."""
    try:
        _refuse_knots(text, where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        table = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(f"{where} is not YAML: {reason}", hint="mend it there") from error
    if not isinstance(table, dict) or not isinstance(node, yaml.MappingNode):
        raise PolicyError(
            f"{where} is not a policy", hint="a policy is a table of keys, `rules` among them"
        )
    return Read(table, dict(_walk(node, (), where)))


def _refuse_knots(text: str, where: str) -> None:
    """Refuse anchors, aliases, and nesting that no policy has, before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise PolicyError(
                f"{where}, line {line}: there is an anchor or an alias", hint="write it out"
            )
        if depth > DEEPEST:
            raise PolicyError(
                f"{where}, line {line}: it nests deeper than a policy does", hint="mend it there"
            )


def _walk(node: yaml.Node, place: Place, where: str) -> Iterator[tuple[Place, int]]:
    yield place, node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*place, index), where)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else "this"
            if name in seen:
                raise PolicyError(
                    f"{where}, line {line}: key `{name}` stands there twice", hint="keep one"
                )
            seen.add(name)
            yield from _walk(value, (*place, name), where)
            yield (*place, name), line
