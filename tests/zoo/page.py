"""docs/models.md of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.zoo import tiny

HEAD = """\
# Which models run

`make zoo` wrote this page. Each causal type of transformers {transformers}, and each other type
that carries text, was made tiny with random weights, saved as the library saves it, and audited
in float32 on a CPU. Losses in full precision and under `rtn-4bit` are compared with those of
plain transformers, where a second implementation rounds the same linear layers. **gptq** is the
KL divergence of `gptq-4bit`, calibrated on 2,560 random tokens, over that of `rtn-4bit`: below 1
it is better. The page says nothing about other schemes, real checkpoints, other dtypes and GPUs,
and nothing about a type that was not tried.

A type runs **in blocks**, one after another, or is refused.
Differences are relative, of the worst of three documents; above 1e-5 a type is **wrong**.
**Left** are linear layers of blocks that stay in full precision; embeddings, heads and towers
always do. A refusal for the share of a block that is not linear may be one of these tiny sizes
alone.
"""


def page(results: Mapping[str, Any]) -> str:
    types = results["types"]
    kinds = {"Decoders": tiny.decoders(), "Wrappers and others that carry text": tiny.wrappers()}
    parts = [HEAD.format(transformers=results["transformers"]), _counts(kinds, types)]
    for title, names in kinds.items():
        rows = {n: types[n] for n in names if n in types}
        parts += [f"## {title}\n", _right(rows), _reasons(rows)]
    return "\n".join(parts)


def _counts(kinds: Mapping[str, list[str]], types: Mapping[str, Any]) -> str:
    columns = ("in blocks", "refused", "wrong", "not tried")
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for title, names in kinds.items():
        counts = Counter(types[n]["runs"] for n in names if n in types)
        lines.append(f"| {title} | {' | '.join(str(counts[c]) for c in columns)} |")
    return "\n".join(lines) + "\n"


def _right(rows: Mapping[str, Any]) -> str:
    lines = [
        "| type | runs | full precision | rtn | gptq | quantized | left |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        if row["runs"] == "in blocks":
            left = ", ".join(f"`{n}`" for n in row["left"]) or "none"
            numbers = (f"{row['fp']:.1e}", f"{row['rtn']:.1e}", _ratio(row))
            cells = (*numbers, str(row["quantized"]), left)
            lines.append(f"| {name} | {row['runs']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['gptq']:.2f}" if "gptq" in row else "-"


def _reasons(rows: Mapping[str, Any]) -> str:
    lines = ["| type | | reason |", "| --- | --- | --- |"]
    for outcome in ("wrong", "refused", "not tried"):
        for name, row in rows.items():
            if row["runs"] == outcome:
                lines.append(f"| {name} | {outcome} | {row['reason'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"
