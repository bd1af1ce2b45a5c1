"""Whether a quantized file has the tokenizer of its base, and the refusals where it is another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qaudit.errors import UsageError
from qaudit.whole import read_regular

VOCABULARY = "vocabulary"


def read_tokenizer(folder: Path) -> Mapping[str, Any] | None:
    """Return the table of a folder's `tokenizer.json`; None where none can be compared."""
    try:
        table = json.loads(read_regular(folder / "tokenizer.json").decode())
        is_table = isinstance(table["model"]["vocab"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return table if is_table else None


def differing_part(own: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return the part by which two tokenizers make other tokens of a text; "" if there is none."""
    if own["model"]["vocab"] != base["model"]["vocab"]:
        return VOCABULARY
    if merges_of(own) != merges_of(base):
        return "merges"
    for part in ("normalizer", "pre_tokenizer"):
        if not _alike(own.get(part), base.get(part)):
            return part.replace("_", "-")
    return ""


def merges_of(table: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the pairs of a BPE, which are written as lists or with a space."""
    pairs = table["model"].get("merges") or ()
    return [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in pairs]


def _alike(own: Any, base: Any) -> bool:
    """Compare settings; one that an older library did not write yet has its default."""
    if isinstance(own, dict) and isinstance(base, dict):
        return all(_alike(own[key], base[key]) for key in own.keys() & base.keys())
    if isinstance(own, list) and isinstance(base, list):
        return len(own) == len(base) and all(map(_alike, own, base))
    return type(own) is type(base) and bool(own == base)


def other_model(label: str, key: str, own: object, theirs: object, base: Path) -> UsageError:
    return UsageError(
        f"`{label}` is no file of this model: its `{key}` is {str(own)[:40]}, and that of `{base}` "
        f"is {str(theirs)[:40]}",
        hint="give the model that the file was made from as the target",
    )


def other_tokenizer(label: str, part: str, base: Path) -> UsageError:
    """Make the error for a file whose tokens are not those of its base."""
    what = "token ids mean other text" if part == VOCABULARY else "a text has other tokens"
    kind = f"other {part}" if part == "merges" else f"another {part}"
    return UsageError(
        f"`{label}` has {kind} than `{base}`: {what}",
        hint="give the model that the file was made from as the target",
    )
