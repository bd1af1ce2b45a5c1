"""The rows of all subjects together: what moved since the checkpoint before. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rows = list[dict[str, Any]]


def summarize(rows: Rows, before: Mapping[str, str]) -> Rows:
    """Return rows with the difference of each distance to the grid from the checkpoint before.

    Rows of tensors are left out: they stay in the file that `details` names. `before` names the
    checkpoint before for each label; where it was not diagnosed there is no drift.
    """
    rows = [row for row in rows if row["part"] != "tensor"]
    distances = {(row["subject"], row["part"], row["name"]): row["grid_distance"] for row in rows}
    compared = []
    for row in rows:
        label = before.get(row["subject"])
        earlier = distances.get((label, row["part"], row["name"]), {})
        drift = {b: off - earlier[b] for b, off in row["grid_distance"].items() if b in earlier}
        compared.append({**row, "grid_drift": drift, "previous": label} if drift else row)
    return compared
