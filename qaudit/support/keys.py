"""Turn pydantic's first error into a sentence and a hint.

Pydantic's messages name types and models. These name the key that is wrong, the key that was
probably meant, and what is allowed there.

Optional packages are installed as extras of this distribution, with its bounds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table of keys",
    "too_short": "a longer list",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
    "dataclass_type": "a table of keys",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, of a dataclass


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint: the known word most like this one, or all known words."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"one of: {', '.join(known)}" if known else "there is none to choose from"


def explain(
    errors: Sequence[Mapping[str, Any]], allowed: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """Return a sentence and a hint for pydantic's errors: an unknown key first, then the outermost.

    `allowed` holds the keys of every table, by the last named key that leads to it; the
    outermost table is "".
    """
    error = first(errors)
    # Not the branches of a union, which pydantic names as if they were keys.
    path = [
        part
        for part in error["loc"]
        if not (isinstance(part, str) and re.match(r"[A-Z]|.*\[|(str|int|float|bool)$", part))
    ]
    where, key = dotted(path), str(path[-1]) if path else ""
    table = next((p for p in reversed(path[:-1]) if isinstance(p, str) and p in allowed), "")
    if error["type"] in _UNKNOWN:
        return f"there is no key `{where}`", nearest(key, allowed.get(str(table), ()))
    if error["type"] in ("missing", "missing_argument"):
        return f"key `{where}` is missing", "add it"
    place = f"`{where}`" if where else "all of it"
    if error["type"] == "value_error":
        sentence, _, hint = _lowered(str(error["msg"])).partition("; ")
        return f"{place}: {sentence}", hint
    expected = _EXPECTED.get(error["type"]) or _lowered(str(error["msg"]))
    return f"{place} is {_shown(error.get('input'))}", f"it must be {expected}"


def first(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the error to report: an unknown key explains most others."""
    return min(errors, key=lambda e: (e["type"] not in _UNKNOWN, len(e["loc"])))


def dotted(path: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _lowered(message: str) -> str:
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


def _shown(value: object) -> str:
    text = f"`{value}`"
    return text if len(text) <= 60 else text[:57] + "...`"


def as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Quote the first names, and count those behind them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


INSTALL = "pip install qaudit-llm"
EXTRAS = {
    "accelerate": "verify",
    "compressed-tensors": "verify",
    "gguf": "gguf",
    "gptqmodel": "gptqmodel",
    "lm_eval": "tasks",
    "mlx-lm": "mlx",
    "pandas": "pandas",
    "pyarrow": "parquet",
    "vllm": "vllm",
    "xllamacpp": "llamacpp",
    "zstandard": "inspect",
}
"""Package -> the extra that brings it. What is not listed is a dependency."""


def install(*packages: str) -> str:
    """Return the command that installs packages."""
    extras = sorted({EXTRAS[name] for name in packages if name in EXTRAS})
    return f"pip install 'qaudit-llm[{','.join(extras)}]'" if extras else INSTALL
