"""JSON and YAML that somebody else wrote, read so that whatever is wrong is one sentence.

Both formats leave room that only a mistake or a trap would use, and their readers differ in what
they make of it: a key that stands twice, NaN in JSON, a date that no calendar has, a few lines of
aliases that stand for a billion items, brackets so deep that the parser in C overruns its stack
and takes the process with it. All of that is refused here, by ValueError, before anything is
built of it. Aliases are allowed where a file is not blown up by them: families use them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from yaml import Node

LARGEST_YAML = 1_000_000
"""Characters of a file of keys; the largest that ships has a hundredth of it."""

DEEPEST_YAML = 32
"""Tables and lists inside each other."""

MOST_ITEMS = 100_000
"""Keys and items, those included that aliases repeat."""

# ------------------------------------------------------------------------------------------ JSON


def json_of(text: str) -> Any:
    """Return what a JSON document says; ValueError says what is wrong with it."""
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("it nests without end") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"`{_first_twice(key for key, _ in pairs)}` stands twice in one object")
    return table


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"`{name}` is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"`{_short(text)}` is too large for a number")
    return value


# ------------------------------------------------------------------------------------------ YAML


def yaml_of(text: str) -> Any:
    """Return what a YAML document says; ValueError says what is wrong with it."""
    return yaml_and_nodes(text)[0]


def yaml_and_nodes(text: str) -> tuple[Any, Node | None]:
    """Return what a YAML document says, and the nodes that know where each part stands."""
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"it has {len(text)} characters, and no file of keys is that long")
    try:
        _refuse_depth(text)
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _size(node, {}, set())
            return loader.construct_document(node), node
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ValueError(_in_a_line(error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error


def _refuse_depth(text: str) -> None:
    """Refuse what nests too deep by its events: whatever builds nodes recurses, in C."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_YAML:
            raise ValueError(
                f"{_line(event)}: it nests deeper than {DEEPEST_YAML} tables and lists"
            )


def _size(node: Node, known: dict[int, int], above: set[int]) -> int:
    """Count what a node stands for, and refuse knots, floods and keys that stand twice."""
    import yaml

    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in above:
        raise ValueError(f"{_line(node)}: an alias stands inside of what it stands for")
    if id(node) not in known:
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(node)
            parts = [part for pair in node.value for part in pair]
        around = above | {id(node)}
        known[id(node)] = 1 + sum(_size(part, known, around) for part in parts)
    if known[id(node)] > MOST_ITEMS:
        raise ValueError(f"{_line(node)}: more than {MOST_ITEMS} items, and no file has as many")
    return known[id(node)]


def _refuse_twice(node: Node) -> None:
    keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key.value, str)]
    if len(set(keys)) < len(keys):
        twice = _first_twice(keys)
        last = [key for key, _ in node.value if (key.tag, key.value) == twice][-1]
        raise ValueError(f"{_line(last)}: key `{_short(twice[1])}` stands there twice")


def _line(part: Any) -> str:
    """Name the line where a node or an event begins."""
    return f"line {part.start_mark.line + 1}"


@cache
def _loader() -> Any:
    """Return the safe loader, in C where there is one, that names what it cannot read."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast

    class Loader(base):  # type: ignore[misc]
        def construct_object(self, node: Node, deep: bool = False) -> Any:
            if isinstance(node, yaml.ScalarNode) and not _is_text(node.value):
                raise yaml.constructor.ConstructorError(
                    None, None, "there is half a character", node.start_mark
                )
            try:
                return super().construct_object(node, deep)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                kind = node.tag.rpartition(":")[2]
                said = f"`{_short(str(node.value))}` is no {_KINDS.get(kind, kind)}"
                raise yaml.constructor.ConstructorError(
                    None, None, said, node.start_mark
                ) from error

    return Loader


_KINDS = {"timestamp": "date", "int": "whole number", "float": "number", "bool": "yes or no"}


def _is_text(value: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _in_a_line(error: Any) -> str:
    """Say a parser's problem with its line, and without its drawing of the place."""
    mark = error.problem_mark or error.context_mark
    said = " ".join(str(error.problem or error.context or "it cannot be read").split())[:200]
    return f"line {mark.line + 1}: {said}" if mark else said


Place = tuple[str | int, ...]
"""The keys and positions that lead to a value: `("rules", 0, "margin")`."""


def lines_of(node: Node | None) -> dict[Place, int]:
    """Return the line of every key and item of a document."""
    found: dict[Place, int] = {}

    def walk(part: Node, place: Place) -> None:
        found.setdefault(place, part.start_mark.line + 1)
        for index, item in enumerate(part.value if isinstance(part.value, list) else ()):
            if isinstance(item, tuple):  # a key and its value: the key's line counts
                name = item[0].value if isinstance(item[0].value, str) else "this"
                found[*place, name] = item[0].start_mark.line + 1
                walk(item[1], (*place, name))
            else:
                walk(item, (*place, index))

    if node is not None:
        walk(node, ())
    return found


def nearest_line(lines: Mapping[Place, int], place: Place) -> int:
    """Return the line of a place, or of the nearest one around it."""
    while place not in lines and place:
        place = place[:-1]
    return lines.get(place, 1)


# ------------------------------------------------------------------------------------------ both


def _first_twice(keys: Iterable[Any]) -> Any:
    seen: set[Any] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
