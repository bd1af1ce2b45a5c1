"""Tables of bits as files: read, written, and pinned when a scan is planned.

A plan has `table=` and the first digits of the sha256 of the table; the table itself is a file of
that name in `evidence/tables` of the output folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from qaudit.core.mixture import DIGITS, NO_TABLE, Mixture, Table
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.errors import SchemeError
from qaudit.support.foreign import json_of
from qaudit.types import digest
from qaudit.whole import read_regular, write_whole

TABLES = "tables"
"""The folder in `evidence/` for the bits of each linear of mixtures."""


def read_table(path: Path) -> Table:
    try:
        table = json_of(read_regular(path).decode())
        rows: dict[str, str] = {str(name): str(bits) for name, bits in table.items()}
        if rows and not set("".join(rows.values())) - {"0", *DIGITS}:
            return rows
        raise ValueError("it has other values than digits of 2 to 8 bits")
    except (OSError, ValueError, AttributeError) as error:
        raise SchemeError(
            f"`{path}` is no table of bits: {error}",
            hint='write `{"self_attn.q_proj": "433"}`, a digit for each block, or take a file of '
            "`evidence/tables` of another audit",
        ) from error


def write_table(table: Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dict(table), indent=1) + "\n")


def pinned_tables(schemes: Iterable[Scheme], evidence: Path | None = None) -> tuple[Scheme, ...]:
    """Return schemes whose tables are named by their content."""
    return tuple(
        replace(scheme, table=_name(read_table(_file(scheme.table, evidence))))
        if isinstance(scheme, Mixture) and scheme.table != NO_TABLE
        else scheme
        for scheme in schemes
    )


def keep_tables(schemes: Sequence[str], out: Path) -> None:
    """Write the tables that schemes name into the output folder."""
    evidence = out / "evidence"
    for scheme in parse_schemes(schemes):
        if isinstance(scheme, Mixture) and scheme.table != NO_TABLE:
            table = read_table(_file(scheme.table, evidence))
            write_table(table, evidence / TABLES / f"{_name(table)}.json")


def _name(table: Table) -> str:
    return digest(dict(table))[:12]


def _file(text: str, evidence: Path | None) -> Path:
    """Return the file of a table, by its path or as a plan names it."""
    kept = (evidence or Path()) / TABLES / f"{text}.json"
    return kept if kept.is_file() else Path(text)
