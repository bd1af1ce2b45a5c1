"""Read JSON and YAML of others strictly; ValueError names what is wrong in one sentence.

Both formats allow input that only a mistake or an attack would contain, and parsers disagree on
it: duplicate keys, NaN in JSON, dates that do not exist, a few lines of aliases that expand to a
billion items, brackets so deep that the parser in C overruns its stack and ends the process. All
of that is refused here, before a value is built. Aliases are allowed within a bound: families use
them.

**Regular expressions**: Python's `re` cannot stop once it has begun. It backtracks: nested repeats
are exponential in the length of a name, and many repeats in a row a polynomial of their number.
Patterns of names need neither, so both are refused unmatched.
"""

from __future__ import annotations

import json
import math
import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qaudit.errors import RecipeError
from qaudit.whole import read_regular

if TYPE_CHECKING:
    from yaml import Node

LARGEST_YAML = 1_000_000
"""Characters of a file of keys; the largest that ships has a hundredth of it."""

DEEPEST_YAML = 32
"""Tables and lists inside each other."""

MOST_ITEMS = 100_000
"""Keys and items, those included that aliases repeat."""


def json_of(text: str, *, of_python: bool = False) -> Any:
    """Parse JSON; `of_python` has NaN and infinities, as Python writes them."""
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            object_pairs_hook=_without_duplicates,
            parse_constant=float if of_python else _no_number,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("it nests without end") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"`{twice}` is twice in one object")
    return table


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"`{name}` is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"`{_short(text)}` is too large for a number")
    return value


def yaml_of(text: str) -> Any:
    return yaml_and_nodes(text)[0]


def yaml_file(path: Path) -> tuple[Any, Node | None]:
    """Read a YAML file of keys; RecipeError names what is wrong with it."""
    try:
        return yaml_and_nodes(read_regular(path).decode())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"`{path}` cannot be read: {reason}", hint="write it as YAML") from error


def yaml_and_nodes(text: str) -> tuple[Any, Node | None]:
    """Parse a YAML document; return its value, and its nodes, which have lines."""
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"it has {len(text)} characters, and no file of keys is that long")
    try:
        depth = 0  # by the parser's events: building nodes would recurse, in C
        for event in yaml.parse(text, Loader=_loader()):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST_YAML:
                raise ValueError(
                    f"{_line(event)}: it nests deeper than {DEEPEST_YAML} tables and lists"
                )
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _size(node, {}, set())
            return loader.construct_document(node), node
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:  # without its drawing of the place
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "it cannot be read").split())
        raise ValueError(f"{f'line {mark.line + 1}: ' if mark else ''}{problem[:200]}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error


def _size(node: Node, known: dict[int, int], above: set[int]) -> int:
    """Count the items of a node, aliases expanded; refuse cycles, floods and duplicate keys."""
    import yaml

    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in above:
        raise ValueError(f"{_line(node)}: an alias is inside of its own anchor")
    if id(node) not in known:
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        around = above | {id(node)}
        known[id(node)] = 1 + sum(_size(part, known, around) for part in parts)
    if known[id(node)] > MOST_ITEMS:
        raise ValueError(f"{_line(node)}: more than {MOST_ITEMS} items, and no file needs as many")
    return known[id(node)]


def _line(part: Any) -> str:
    return f"line {part.start_mark.line + 1}"


@cache
def _loader() -> Any:
    """Return PyYAML's safe loader, in C where available, with errors that name the value."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # Texts that differ may be one key, as `04` and `4`; merged keys may be there again.
            seen = set()
            for node_key, _ in node.value:
                is_merge = node_key.tag == "tag:yaml.org,2002:merge"
                key = node_key.value if is_merge else self.construct_object(node_key, deep=True)
                if isinstance(key, Hashable) and key in seen:
                    sentence = f"key `{_short(str(key))}` is there twice"
                    raise yaml.constructor.ConstructorError(
                        None, None, sentence, node_key.start_mark
                    )
                seen |= {key} if isinstance(key, Hashable) else set()
            return super().construct_mapping(node, deep)

        def construct_object(self, node: Node, deep: bool = False) -> Any:
            if isinstance(node, yaml.ScalarNode) and re.search("[\ud800-\udfff]", node.value):
                raise yaml.constructor.ConstructorError(
                    None, None, "there is half a character", node.start_mark
                )
            try:
                return super().construct_object(node, deep)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                kind = node.tag.rpartition(":")[2]
                sentence = f"`{_short(str(node.value))}` is no {_KINDS.get(kind, kind)}"
                raise yaml.constructor.ConstructorError(
                    None, None, sentence, node.start_mark
                ) from error

    return Loader


_KINDS = {"timestamp": "date", "int": "whole number", "float": "number", "bool": "yes or no"}


Place = tuple[str | int, ...]
"""The keys and positions that lead to a value: `("rules", 0, "margin")`."""


def lines_of(node: Node | None) -> dict[Place, int]:
    lines: dict[Place, int] = {}

    def walk(part: Node, place: Place) -> None:
        lines.setdefault(place, part.start_mark.line + 1)
        for index, item in enumerate(part.value if isinstance(part.value, list) else ()):
            if isinstance(item, tuple):  # a key and its value: the key's line counts
                name = item[0].value if isinstance(item[0].value, str) else "this"
                lines[*place, name] = item[0].start_mark.line + 1
                walk(item[1], (*place, name))
            else:
                walk(item, (*place, index))

    if node is not None:
        walk(node, ())
    return lines


def nearest_line(lines: Mapping[Place, int], place: Place) -> int:
    while place not in lines and place:
        place = place[:-1]
    return lines.get(place, 1)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


# A name has at most 255 characters and, to be matched, 18 digits in a row: within these numbers a
# match that fails takes well under a second.
_MOST_REPEATS = 8
_MOST_WAYS = 1 << 12  # those of families that ship have fewer than 100
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT)
_DIGITS = ([(op.CATEGORY, op.CATEGORY_DIGIT)], [(op.RANGE, (ord("0"), ord("9")))])


def slow_reason(pattern: str, *, most_wide: int = 2) -> str | None:
    """Return why matching may take a time that explodes with the name's length, or None."""
    parsed = parser.parse(pattern)
    repeats = list(_repeats(parsed, inside=False))
    if any(inside for _, inside in repeats):
        return "it repeats what already repeats or has alternatives"
    bodies = [node[1][2] for node, _ in repeats]
    wide = sum(len(b) > 1 or b[0][0] is not op.IN or b[0][1] not in _DIGITS for b in bodies)
    if wide > most_wide:
        return f"{wide} of its repeats match more than digits, and {most_wide} may"
    if len(repeats) > _MOST_REPEATS:
        return f"it has {len(repeats)} repeats, and may have {_MOST_REPEATS}"
    if (ways := _ways(parsed)) > _MOST_WAYS:
        return f"its optional parts and alternatives combine in {ways:,} ways"
    return None


def _ways(sequence: Iterable[Any]) -> int:
    """Return how many ways alternatives and optional parts combine in, each of which is tried."""
    ways = 1
    for code, value in sequence:
        parts = [_ways(part) for part in _parts(code, value)]
        if code is op.BRANCH:
            ways *= sum(parts)
        elif parts:
            optional = code in _REPEATS and value[:2] == (0, 1)
            ways *= parts[0] + optional
    return ways


def _repeats(sequence: Iterable[Any], *, inside: bool) -> Iterator[tuple[Any, bool]]:
    """Yield every repeat of varying length, and alternatives in one; and whether it is nested."""
    for node in sequence:
        code, value = node
        varies = code in _REPEATS and value[0] != value[1]
        if (varies and (inside or value[1] > 1)) or (inside and code is op.BRANCH):
            yield node, inside
        for part in _parts(code, value):
            yield from _repeats(part, inside=inside or (code in _REPEATS and value[1] > 1))


def _parts(code: Any, value: Any) -> Iterable[Any]:
    if code in _REPEATS or code is op.POSSESSIVE_REPEAT:
        return [value[2]]
    if code is op.SUBPATTERN:
        return [value[3]]
    if code is op.BRANCH:
        return list(value[1])
    if code in (op.ASSERT, op.ASSERT_NOT):
        return [value[1]]
    if code is op.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return [value] if code is op.ATOMIC_GROUP else []
