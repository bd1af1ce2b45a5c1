"""Groups of evaluation documents: their names, and fields that group nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from qaudit.errors import CorpusError
from qaudit.types import EvaluationDocument

MOST_STRATA = 32
"""All intervals hold at once, so that more strata would tell less about each."""

LONGEST_STRATUM = 100
"""Characters of a stratum's name at most: it heads a row of a table."""


def stratum_of(where: str, strata: str | None, value: dict[str, Any]) -> str:
    """Return the value of the field that groups documents."""
    if strata is None:
        return ""
    stratum = value.get(strata)
    if stratum is None or stratum == "":
        raise CorpusError(
            f"{where} has no value of the field `{strata}`, which groups documents",
            hint=f"its fields are {', '.join(value)}; every document needs a value",
        )
    name = str(stratum) if isinstance(stratum, int) else stratum
    if not isinstance(name, str) or not name.isprintable() or len(name) > LONGEST_STRATUM:
        raise CorpusError(
            f"field `{strata}` in {where} is no name that documents can be grouped by",
            hint=f"name a field of whole numbers or of words, of at most "
            f"{LONGEST_STRATUM} characters",
        )
    return name


def no_strata(text: str, strata: str) -> CorpusError:
    """Return the refusal of a text whose documents have no fields."""
    return CorpusError(
        f"{text} is plain text and has no field `{strata}` to group its documents by",
        hint="leave out `strata`, or give JSON lines or Parquet with `--evaluation`",
    )


def strata_notes(documents: Sequence[EvaluationDocument], field: str) -> list[str]:
    """Return notes on the strata of documents, or refuse them."""
    counts = Counter(document.stratum for document in documents)
    total = len(documents)
    if max(counts.values()) < 2:
        raise CorpusError(
            f"each of the {total} evaluation documents has its own value of `{field}`, "
            "and an interval is between documents of one value",
            hint="name a field whose values repeat: `--set strata=source`",
        )
    if len(counts) > MOST_STRATA:
        raise CorpusError(
            f"the field `{field}` has {len(counts)} values in {total} evaluation documents, "
            f"and at most {MOST_STRATA} are compared at once",
            hint="name a field with fewer values: `--set strata=source`",
        )
    notes = []
    if len(counts) == 1:
        notes.append(
            f"all evaluation documents have the value `{next(iter(counts))}` of `{field}`: "
            "shuffle the text if it has others further down"
        )
    if alone := sum(count == 1 for count in counts.values()):
        notes.append(f"{alone} of {len(counts)} strata have one document, and no interval")
    return notes
