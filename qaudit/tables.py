"""Rows of an audit as a tuple that also gives records and a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qaudit.errors import MachineError
from qaudit.saved.codec import encode

if TYPE_CHECKING:
    import pandas


class Table(tuple[Any, ...]):
    """A tuple of frozen rows."""

    __slots__ = ()

    def to_records(self) -> list[dict[str, Any]]:
        """Return each row as a dictionary, with the names that it has in audit.json."""
        return [encode(row) for row in self]

    def to_pandas(self) -> pandas.DataFrame:
        try:
            import pandas
        except ImportError as error:
            raise MachineError(
                "pandas is not installed", hint="pip install pandas, or use `.to_records()`"
            ) from error
        return pandas.DataFrame(self.to_records())
